// Run Node's clients against a server of any model; see check_clients.py.
//   npm install openai ai @ai-sdk/openai @ai-sdk/openai-compatible zod
//   node check_clients.mjs http://127.0.0.1:8000
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`, apiKey = "none";
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const City = z.object({ name: z.enum(["Oslo", "Bergen"]), isCapital: z.boolean() });
const prompt = "Name a city in Norway.", maxOutputTokens = 60;
const body = { model, messages: [{ role: "user", content: prompt }], max_tokens: 60 };

const { choices, usage } = await client.chat.completions.create({ ...body, logprobs: true });
assert.equal(usage.completion_tokens, choices[0].logprobs.content.length);
const stream = client.chat.completions.stream({ ...body, stream_options: { include_usage: true } });
assert((await stream.totalUsage()).completion_tokens);
const response_format = zodResponseFormat(City, "city");
const { choices: [parsed] } = await client.chat.completions.parse({ ...body, response_format });
assert(parsed.message.parsed);
assert((await client.responses.create({ model, input: prompt, max_output_tokens: 9 })).output_text);
let stored;
const store = { name: "add_city", parse: JSON.parse, function: (city) => (stored = city), parameters: z.toJSONSchema(City) };
const tool_choice = { type: "function", function: { name: "add_city" } };
await client.chat.completions.runTools({ ...body, tool_choice, tools: [{ type: "function", function: store }] }).done();
assert(City.parse(stored));
console.log("openai: passed");

const sdk = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({ name: "x", baseURL, includeUsage: true, supportsStructuredOutputs: true });
for (const chosen of [compatible(model), sdk.chat(model), sdk.responses(model)]) {
  assert((await generateText({ model: chosen, prompt, maxOutputTokens })).text);
  const { text, usage } = streamText({ model: chosen, prompt, maxOutputTokens });
  assert((await text) && (await usage).outputTokens);
  assert((await generateObject({ model: chosen, prompt, schema: City })).object);
  const tools = { add_city: tool({ description: "Store", inputSchema: City }) };
  const { toolCalls } = await generateText({ model: chosen, prompt, tools, toolChoice: "required", maxOutputTokens });
  assert(City.parse(toolCalls[0].input));
  console.log(`ai, ${chosen.provider}: passed`);
}
