// The Anthropic SDK for Node.
import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic, { AuthenticationError, BadRequestError, RateLimitError } from "@anthropic-ai/sdk";
import * as c from "./conversation.mjs";

const client = new Anthropic({ baseURL: c.rootURL, apiKey: c.key });
const tools = c.tools.map(({ name, description, parameters }) => ({ name, description, input_schema: parameters }));
const asked = { model: c.model, max_tokens: 300, messages: [{ role: "user", content: c.said.long_question }] };

async function whole(request) {
  return client.messages.create(request);
}

async function streamed(request) {
  const stream = client.messages.stream(request);
  let text = "";
  stream.on("text", (delta) => (text += delta));
  const made = await stream.finalMessage();
  assert.equal(text, made.content.filter((block) => block.type === "text").map((block) => block.text).join(""));
  return made;
}

for (const ask of [whole, streamed]) {
  test(`three turns call both tools, ${ask.name}`, async () => {
    const messages = [{ role: "user", content: c.question }];
    const [called, reasons, texts, thoughts] = [[], [], [], []];
    for (let turn = 0; turn < 3; turn++) {
      const made = await ask({ model: c.model, max_tokens: 300, system: c.system, messages, tools });
      reasons.push(made.stop_reason);
      assert.ok(made.usage.input_tokens > 0 && made.usage.output_tokens > 0);
      messages.push({ role: "assistant", content: made.content });
      const answers = [];
      for (const block of made.content) {
        if (block.type === "text") texts.push(block.text);
        if (block.type === "thinking") thoughts.push(block.thinking);
        if (block.type !== "tool_use") continue;
        called.push({ name: block.name, arguments: block.input });
        const content = c.resultOf(block.name, block.input);
        answers.push({ type: "tool_result", tool_use_id: block.id, content });
      }
      if (answers.length) messages.push({ role: "user", content: answers });
    }
    assert.deepEqual(called, c.calls);
    assert.deepEqual(reasons, ["tool_use", "tool_use", "end_turn"]);
    assert.deepEqual(texts, [c.remark, c.answer]);
    assert.deepEqual(thoughts, c.thoughts);
    c.checkPrompt({ withThoughts: true });
  });
}

test("a limit ends the text with max_tokens", async () => {
  const made = await client.messages.create({ ...asked, max_tokens: 5 });
  assert.equal(made.stop_reason, "max_tokens");
  assert.equal(made.usage.output_tokens, 5);
});

test("tokens are counted", async () => {
  const { input_tokens } = await client.messages.countTokens({ model: c.model, messages: asked.messages });
  assert.equal(input_tokens, (await client.messages.create(asked)).usage.input_tokens);
});

test("errors have the classes of the package", async () => {
  const refused = (one, request) => one.messages.create({ ...asked, ...request });
  await assert.rejects(refused(client, { messages: [{ role: "user", content: c.overflow }] }), (error) => {
    assert.ok(error instanceof BadRequestError);
    assert.match(error.message, /prompt is too long/);
    return true;
  });
  await assert.rejects(refused(new Anthropic({ baseURL: c.rootURL, apiKey: "wrong" }), {}), AuthenticationError);
  // With retries it would wait for as long as `retry-after` says.
  const waiting = new Anthropic({ baseURL: c.rootURL, apiKey: c.spentKey, maxRetries: 0 });
  await assert.rejects(refused(waiting, {}), RateLimitError);
});
