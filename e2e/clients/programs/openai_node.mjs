// openai for Node.
import assert from "node:assert/strict";
import { NotFoundError, client, model, run } from "./checks.mjs";

const messages = [{ role: "user", content: "How do I use the with statement?" }];

await run({
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
});
