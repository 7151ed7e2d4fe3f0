// openai for Node, with a service that generates images.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { BadRequestError, client, model, run } from "./checks.mjs";

const { toFile } = createRequire(`${process.cwd()}/`)("openai");
const shapes = readFileSync(new URL("../../../examples/shapes.png", import.meta.url));
const own = { model, prompt: "a red star", size: "32x32", seed: 1, num_inference_steps: 10 };
const edit = async (options = {}) =>
  client.images.edit({ ...own, strength: 0.5, image: await toFile(shapes, "shapes.png"), ...options });
const isPng = (item) => Buffer.from(item.b64_json, "base64").subarray(1, 4).toString() === "PNG";

await run({
  async generate() {
    const { data } = await client.images.generate(own);
    assert.ok(isPng(data[0]));
  },
  async edits() {
    const [one, two] = [await edit(), await edit({ image: [await toFile(shapes, "shapes.png")] })];
    assert.ok(isPng(one.data[0]));
    assert.equal(one.data[0].b64_json, two.data[0].b64_json);
    assert.notEqual(one.data[0].b64_json, (await client.images.generate(own)).data[0].b64_json);
  },
  async stream() {
    const types = [];
    for await (const event of await edit({ stream: true, partial_images: 1 })) types.push(event.type);
    assert.deepEqual(types, ["image_edit.partial_image", "image_edit.completed"]);
  },
  async errors() {
    const call = edit({ image: await toFile(Buffer.from("no picture"), "shapes.png") });
    await assert.rejects(call, (error) => error instanceof BadRequestError && error.param === "image");
  },
});
