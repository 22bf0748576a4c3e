// The AI SDK (`ai`) with its providers for servers like OpenAI's, for OpenAI's own two, and for Anthropic's.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, RetryError, generateText, isStepCount, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import * as c from "./conversation.mjs";

const providers = (apiKey) => {
  const openai = createOpenAI({ baseURL: c.baseURL, apiKey });
  const extras = { includeUsage: true, supportsStructuredOutputs: true };
  const compatible = createOpenAICompatible({ name: "quire", baseURL: c.baseURL, apiKey, ...extras });
  return {
    compatible: compatible(c.model),
    "openai chat": openai.chat(c.model),
    "openai responses": openai.responses(c.model),
    anthropic: createAnthropic({ baseURL: c.baseURL, apiKey })(c.model),
  };
};
const execute = (name) => async (given) => c.resultOf(name, given);
const tools = {
  weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: execute("weather"),
  }),
  trains: tool({
    description: "Trains between two cities.",
    inputSchema: z.object({ origin: z.string(), destination: z.string(), passengers: z.number().int() }),
    execute: execute("trains"),
  }),
};
const stopWhen = (isStepCount ?? stepCountIs)(5);
// Without it the provider refers to responses that the server would have stored.
const providerOptions = { openai: { store: false } };
// Which of the providers show the thoughts of chats.
const thinking = { compatible: true, "openai chat": false, "openai responses": false, anthropic: true };

async function checkSteps(steps, name) {
  const called = steps.flatMap((step) => step.toolCalls.map((call) => ({ name: call.toolName, arguments: call.input })));
  assert.deepEqual(called, c.calls);
  assert.deepEqual(steps.map((step) => step.text), [c.remark, "", c.answer]);
  assert.deepEqual(steps.map((step) => step.finishReason), ["tool-calls", "tool-calls", "stop"]);
  const thoughts = steps.map((step) => step.reasoningText ?? "").filter(Boolean);
  assert.deepEqual(thoughts, thinking[name] ? c.thoughts : []);
  for (const step of steps) assert.ok(step.usage.inputTokens > 0 && step.usage.outputTokens > 0);
}

for (const [name, model] of Object.entries(providers(c.key))) {
  test(`${name}: three steps call both tools`, async () => {
    const made = await generateText({ model, system: c.system, prompt: c.question, tools, stopWhen, providerOptions });
    assert.equal(made.text, c.answer);
    await checkSteps(made.steps, name);
    c.checkPrompt({ withThoughts: thinking[name] });
  });

  test(`${name}: a stream has the same`, async () => {
    const made = streamText({ model, system: c.system, prompt: c.question, tools, stopWhen, providerOptions });
    let text = "";
    for await (const delta of made.textStream) text += delta;
    assert.equal(text, c.remark + c.answer);
    await checkSteps(await made.steps, name);
    c.checkPrompt({ withThoughts: thinking[name] });
  });

  test(`${name}: an output is an object`, async () => {
    const schema = z.object({
      number: z.number().int(),
      stops: z.array(z.object({ city: z.string() })),
      night: z.boolean(),
    });
    // Of an unknown model of Anthropic's it forces a call of its own.
    const prompt = name === "anthropic" ? c.said.json_question : c.said.object_question;
    const made = await generateText({ model, prompt, output: Output.object({ schema }) });
    assert.deepEqual(made.output, c.said.object);
  });

  test(`${name}: a limit is a finish reason`, async () => {
    const made = await generateText({ model, prompt: c.said.long_question, maxOutputTokens: 5 });
    assert.equal(made.finishReason, "length");
  });

  test(`${name}: refusals are errors of calls`, async () => {
    const refused = async (asked, prompt, status) => {
      await assert.rejects(generateText({ model: asked, prompt }), (error) => {
        const cause = RetryError.isInstance(error) ? error.lastError : error;
        assert.ok(APICallError.isInstance(cause), String(cause));
        assert.equal(cause.statusCode, status);
        return true;
      });
    };
    await refused(model, c.overflow, 400);
    await refused(providers("wrong")[name], c.question, 401);
    // It repeats such a call after two seconds, and after four.
    if (!name.startsWith("openai")) await refused(providers(c.spentKey)[name], c.question, 429);
  });
}
