// Forced calls, objects and streams of the clients for Node with the demo model.
import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const baseURL = process.env.BASE_URL;
const ask = [{ role: "user", content: "Which animal is it?" }];
const kinds = ["cat", "dog"];
const schema = {
  type: "object",
  properties: { kind: { enum: kinds } },
  required: ["kind"],
  additionalProperties: false,
};

test("openai: a chat calls the tool that it must, whole and streamed", async () => {
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const tools = [{ type: "function", function: { name: "animal", parameters: schema } }];
  const given = { model: "demo", messages: ask, tools, tool_choice: "required", parallel_tool_calls: false, seed: 4 };
  const whole = await client.chat.completions.create({ ...given, max_tokens: 80 });
  const [call] = whole.choices[0].message.tool_calls;
  assert.ok(kinds.includes(JSON.parse(call.function.arguments).kind));
  const stream = client.chat.completions.stream({ ...given, max_tokens: 80 });
  const streamed = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0];
  assert.equal(streamed.function.arguments, call.function.arguments);
  const response = await client.responses.create({ model: "demo", input: "Why?", max_output_tokens: 8 });
  assert.ok(response.usage.output_tokens <= 8);
});

test("@anthropic-ai/sdk: a message calls the tool that it must, whole and streamed", async () => {
  const client = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
  const tools = [{ name: "animal", input_schema: schema }];
  const given = { model: "demo", max_tokens: 80, messages: ask, tools, tool_choice: { type: "any" }, seed: 4 };
  const whole = await client.messages.create(given);
  assert.equal(whole.stop_reason, "tool_use");
  assert.ok(kinds.includes(whole.content[0].input.kind));
  const streamed = await client.messages.stream(given).finalMessage();
  assert.deepEqual(streamed.content[0].input, whole.content[0].input);
});

const apiKey = "none";
const models = {
  compatible: createOpenAICompatible({ name: "quire", baseURL, apiKey, supportsStructuredOutputs: true })("demo"),
  "openai responses": createOpenAI({ baseURL, apiKey })("demo"),
  anthropic: createAnthropic({ baseURL, apiKey })("demo"),
};
for (const [name, model] of Object.entries(models)) {
  test(`ai: ${name} calls the tool that it must`, async () => {
    const animal = tool({ description: "Names the animal.", inputSchema: z.object({ kind: z.enum(kinds) }) });
    const providerOptions = { openai: { store: false } };
    const made = await generateText({
      model, tools: { animal }, toolChoice: "required", prompt: "Which?", maxOutputTokens: 80, maxRetries: 0, providerOptions,
    });
    assert.ok(kinds.includes(made.toolCalls[0].input.kind)); // the limit may cut a later one
  });
}
