// Checks of a client for Node: `node PROGRAM URL MODEL` runs them and names each that holds; the first that does not
// ends the program.
import { createRequire } from "node:module";

export const [url, model] = process.argv.slice(2);
// The package is in the environment's folder, which is the working directory.
const openai = createRequire(`${process.cwd()}/`)("openai");
export const { BadRequestError, NotFoundError } = openai;
export const build = (baseURL, maxRetries) => new openai.default({ baseURL, apiKey: "none", maxRetries });
export const client = build(url, 0);

export async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    await check();
    console.log(`passed: ${name}`);
  }
}
