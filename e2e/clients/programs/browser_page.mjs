// The page examples/speech-and-pictures.html in headless Chromium: `node PROGRAM URL MODEL PART [SCREENSHOT]`.
// PART is `speech` or `pictures`. The page comes from ORIGIN, which the gateway must allow.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const [url, model, part, screenshot] = process.argv.slice(2);
const examples = new URL("../../../examples/", import.meta.url);
const PORT = 8000; // of `python3 -m http.server`
// The packages are in the environment's folder, which is the working directory.
const packages = createRequire(`${process.cwd()}/`);
const puppeteer = packages("puppeteer-core");
const { default: chromium } = await import(packages.resolve("@sparticuz/chromium"));

const [gateway, service] = [new URL(url).origin, new URL(url).pathname.slice(1).replace(/\/?v1$/, "") || model];
const server = createServer((_, answer) => {
  answer.setHeader("Content-Type", "text/html; charset=utf-8");
  answer.end(readFileSync(new URL("speech-and-pictures.html", examples)));
});
await new Promise((resolve) => server.listen(PORT, "127.0.0.1", resolve));
const browser = await puppeteer.launch({
  args: chromium.args.filter((flag) => !flag.includes("web-security")),
  executablePath: await chromium.executablePath(),
  headless: "shell",
});

async function submit(form) {
  const page = await browser.newPage();
  const failures = [];
  page.on("pageerror", (error) => failures.push(error.message));
  await page.goto(`http://localhost:${PORT}/?gateway=${gateway}&${part}=${service}`);
  if (part === "speech") {
    const field = await page.$("#speech input[type=file]");
    await field.uploadFile(fileURLToPath(new URL("words.mp3", examples)));
  }
  for (const [name, value] of Object.entries(form)) {
    await page.$eval(`#${part} [name=${name}]`, (field, value) => (field.value = value), value);
  }
  await page.click(`#${part} button`);
  const status = await page.waitForFunction(
    (part) => document.querySelector(`#${part} ~ [role=status]`).textContent.match(/^(done|Error|No).*/)?.[0],
    { timeout: 120_000 },
    part,
  );
  assert.deepEqual(failures, []);
  return [page, await status.jsonValue()];
}

const checks = {
  async speech_streams_and_has_times() {
    const [page, status] = await submit({});
    assert.match(status, /^done/);
    const words = (await page.$eval(".text", (text) => text.textContent)).split(" ");
    const rows = await page.$$eval("tbody tr", (rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent)));
    assert.ok(words.length > 1);
    assert.deepEqual(rows.flatMap((row) => row[2].split(" ")), words);
    if (screenshot) await page.screenshot({ path: screenshot, fullPage: true });
  },
  async pictures_have_previews() {
    const [page, status] = await submit({ prompt: "a red star", steps: "20" });
    assert.match(status, /^done/);
    const widths = await page.$$eval(".images img", (images) => images.map((image) => image.naturalWidth));
    assert.equal(widths.length, 4);
    assert.ok(widths.every((width) => width > 0));
    if (screenshot) await page.screenshot({ path: screenshot, fullPage: true });
  },
  async errors_are_shown() {
    const [, status] = await submit({ service: `${service}-none` });
    assert.match(status, /^Error: /);
  },
};

try {
  for (const check of Object.values(checks).filter((check) => check.name.startsWith(part) || check.name.startsWith("errors"))) {
    await check();
    console.log(`passed: ${check.name}`);
  }
} finally {
  await browser.close();
  server.close();
}
