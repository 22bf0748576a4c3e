// The openai package for Node: chats and responses.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI, { AuthenticationError, BadRequestError, NotFoundError, RateLimitError } from "openai";
import * as c from "./conversation.mjs";

const client = new OpenAI({ baseURL: c.baseURL, apiKey: c.key });
const model = c.model;
const functions = c.tools.map((tool) => ({ type: "function", function: tool }));
const long = [{ role: "user", content: c.said.long_question }];

async function whole(messages) {
  return client.chat.completions.create({ model, messages, tools: functions });
}

async function streamed(messages) {
  const stream_options = { include_usage: true };
  const stream = client.chat.completions.stream({ model, messages, tools: functions, stream_options });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const made = await stream.finalChatCompletion();
  assert.equal(text, made.choices[0].message.content ?? "");
  return made;
}

for (const ask of [whole, streamed]) {
  test(`three turns call both tools, ${ask.name}`, async () => {
    const messages = [{ role: "system", content: c.system }, { role: "user", content: c.question }];
    const [called, reasons, texts] = [[], [], []];
    for (let turn = 0; turn < 3; turn++) {
      const { choices: [choice], usage } = await ask(messages);
      assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
      reasons.push(choice.finish_reason);
      texts.push(choice.message.content || null);
      messages.push(choice.message);
      for (const call of choice.message.tool_calls ?? []) {
        const made = { name: call.function.name, arguments: JSON.parse(call.function.arguments) };
        called.push(made);
        messages.push({ role: "tool", tool_call_id: call.id, content: c.resultOf(made.name, made.arguments) });
      }
    }
    assert.deepEqual(called, c.calls);
    assert.deepEqual(reasons, ["tool_calls", "tool_calls", "stop"]);
    assert.deepEqual(texts, [c.remark, null, c.answer]);
    // Of a thought in several chunks its stream keeps the last.
    c.checkPrompt({ withThoughts: ask === whole ? true : null });
  });
}

async function wholeResponse(request) {
  return client.responses.create(request);
}

async function streamedResponse(request) {
  const stream = client.responses.stream(request);
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const made = await stream.finalResponse();
  assert.equal(text, made.output_text);
  return made;
}

for (const ask of [wholeResponse, streamedResponse]) {
  test(`three turns of responses call both tools, ${ask.name}`, async () => {
    const input = [{ role: "user", content: c.question }];
    const [called, texts, thoughts] = [[], [], []];
    const tools = c.tools.map((tool) => ({ type: "function", strict: null, ...tool }));
    for (let turn = 0; turn < 3; turn++) {
      const made = await ask({ model, instructions: c.system, input, tools });
      assert.equal(made.status, "completed");
      texts.push(made.output_text);
      for (const item of made.output) {
        input.push(item);
        if (item.type === "reasoning") thoughts.push(item.content[0].text);
      }
      for (const item of made.output.filter((one) => one.type === "function_call")) {
        called.push({ name: item.name, arguments: JSON.parse(item.arguments) });
        const output = c.resultOf(item.name, called.at(-1).arguments);
        input.push({ type: "function_call_output", call_id: item.call_id, output });
      }
    }
    assert.deepEqual(called, c.calls);
    assert.deepEqual(texts, [c.remark, "", c.answer]);
    assert.deepEqual(thoughts, c.thoughts);
    c.checkPrompt({ withThoughts: true });
  });
}

test("a runner calls the tools itself", async () => {
  const tools = c.tools.map((tool) => ({
    type: "function",
    function: { ...tool, parse: JSON.parse, function: (given) => c.resultOf(tool.name, given) },
  }));
  const messages = [{ role: "system", content: c.system }, { role: "user", content: c.question }];
  const runner = client.chat.completions.runTools({ model, messages, tools });
  assert.equal(await runner.finalContent(), c.answer);
});

test("a limit ends the text with length", async () => {
  const made = await client.chat.completions.create({ model, messages: long, max_completion_tokens: 5 });
  assert.equal(made.choices[0].finish_reason, "length");
  assert.equal(made.usage.completion_tokens, 5);
});

test("errors have the classes of the package", async () => {
  const asked = (one, messages) => one.chat.completions.create({ model, messages });
  await assert.rejects(asked(client, [{ role: "user", content: c.overflow }]), (error) => {
    assert.ok(error instanceof BadRequestError);
    assert.equal(error.code, "context_length_exceeded");
    return true;
  });
  await assert.rejects(asked(new OpenAI({ baseURL: c.baseURL, apiKey: "wrong" }), long), AuthenticationError);
  await assert.rejects(asked(new OpenAI({ baseURL: c.baseURL, apiKey: c.spentKey }), long), RateLimitError);
  await assert.rejects(client.chat.completions.create({ model: "other", messages: long }), NotFoundError);
});
