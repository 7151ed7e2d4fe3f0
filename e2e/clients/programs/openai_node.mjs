// openai for Node: `node openai_node.mjs URL MODEL` runs the checks and names each that holds.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [url, model] = process.argv.slice(2);
// The package is in the environment's folder, which is the working directory.
const { default: OpenAI, NotFoundError } = createRequire(`${process.cwd()}/`)("openai");
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "How do I use the with statement?" }];

const checks = {
  async models() {
    const ids = [];
    for await (const found of client.models.list()) ids.push(found.id);
    assert.deepEqual(ids, [model]);
  },
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_completion_tokens: 20 });
    assert.ok(answer.choices[0].message.content);
  },
  async stream() {
    const body = { model, messages, max_tokens: 30, temperature: 0 };
    const whole = await client.chat.completions.create(body);
    const stream = await client.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } });
    let text = "", usage;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.total_tokens, whole.usage.total_tokens);
  },
  async stream_helper() {
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 10 });
    assert.ok(await stream.finalContent());
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: "with open(", max_tokens: 8 });
    assert.equal(answer.object, "text_completion");
  },
  async errors() {
    const call = client.chat.completions.create({ model: "no-such", messages });
    await assert.rejects(call, (error) => error instanceof NotFoundError && error.param === "model");
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`passed: ${name}`);
}
