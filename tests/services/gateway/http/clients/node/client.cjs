// Calls a server with the official Node client, and prints what came as JSON.
//   BASE_URL  such as http://127.0.0.1:8000/v1
//   NODE_PATH where the package `openai` is installed
const { OpenAI } = require("openai");

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const model = "tiny-llama";
const messages = [{ role: "user", content: "Why is the sky blue?" }];
const prompt = "The quick brown fox";
const schema = {
  type: "object",
  properties: { on: { type: "boolean" } },
  required: ["on"],
  additionalProperties: false,
};

async function joined(stream, text) {
  let whole = "";
  for await (const chunk of stream) whole += chunk.choices.map(text).join("");
  return whole;
}

async function main() {
  const output = {};
  const chat = { model, messages, max_completion_tokens: 12, seed: 5 };
  output.models = (await client.models.list()).data.map((one) => one.id);
  output.completion = (await client.completions.create({ model, prompt, max_tokens: 12, seed: 5 })).choices[0].text;
  output.completionStream = await joined(
    await client.completions.create({ model, prompt, max_tokens: 12, seed: 5, stream: true }),
    (choice) => choice.text,
  );
  output.chat = (await client.chat.completions.create(chat)).choices[0].message.content;
  output.chatStream = await joined(
    await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } }),
    (choice) => choice.delta.content ?? "",
  );
  const json_schema = { name: "switch", schema, strict: true };
  output.json = (
    await client.chat.completions.create({
      ...chat,
      max_completion_tokens: 200,
      response_format: { type: "json_schema", json_schema },
    })
  ).choices[0].message.content;
  const tools = [{ type: "function", function: { name: "turn", parameters: schema } }];
  const tool_choice = { type: "function", function: { name: "turn" } };
  const runner = client.chat.completions.stream({ ...chat, max_completion_tokens: 200, tools, tool_choice });
  output.call = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;
  const request = { model, input: messages, max_output_tokens: 12, seed: 5 };
  output.response = (await client.responses.create(request)).output_text;
  output.responseStream = (await client.responses.stream(request).finalResponse()).output_text;
  output.error = await client.completions.create({ model: "gpt-4", prompt }).catch((error) => [error.status, error.code]);
  console.log(JSON.stringify(output));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
