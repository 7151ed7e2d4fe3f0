// openai for Node, with a service that embeds.
import assert from "node:assert/strict";
import { NotFoundError, client, model, run } from "./checks.mjs";

const texts = ["open a file", "the with statement", "lists"];
const embed = async (input, options = {}) =>
  (await client.embeddings.create({ model, input, ...options })).data.map((item) => item.embedding);
const near = (one, other) => one.length === other.length && one.every((x, i) => Math.abs(x - other[i]) < 1e-4);

await run({
  async one_text() {
    const [vector] = await embed(texts[0]);
    assert.ok(Math.abs(Math.hypot(...vector) - 1) < 1e-3);
  },
  async several() {
    const vectors = await embed(texts);
    for (const [i, text] of texts.entries()) assert.ok(near(vectors[i], (await embed(text))[0]));
  },
  async encodings() {
    // The client asks for base64 by itself where nothing is said.
    assert.ok(near((await embed(texts[0]))[0], (await embed(texts[0], { encoding_format: "float" }))[0]));
  },
  async errors() {
    const call = client.embeddings.create({ model: "no-such", input: texts });
    await assert.rejects(call, (error) => error instanceof NotFoundError && error.param === "model");
  },
});
