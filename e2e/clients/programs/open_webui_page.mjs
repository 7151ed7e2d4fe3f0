// Open WebUI's page in headless Chromium: `node PROGRAM URL MODEL [SCREENSHOT]`, in the folder with the packages.
// A person uploads a picture, asks about it, and asks again.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const [url, model, screenshot] = process.argv.slice(2);
const picture = fileURLToPath(new URL("../../../examples/shapes.png", import.meta.url));
const packages = createRequire(`${process.cwd()}/`);
const puppeteer = packages("puppeteer-core");
const { default: chromium } = await import(packages.resolve("@sparticuz/chromium"));
const browser = await puppeteer.launch({
  args: chromium.args,
  executablePath: await chromium.executablePath(),
  headless: "shell",
  env: { ...process.env, LANG: "en_US.UTF-8" }, // with the locale C, Chromium's language is no tag that pages can use
  defaultViewport: { width: 1440, height: 900 },
});
const page = await browser.newPage();
page.setDefaultTimeout(120_000);

async function ask(question, answers) {
  await page.locator("#chat-input").click();
  await page.keyboard.type(question);
  await page.locator("#send-message-button").click();
  await page.waitForFunction((count) => document.querySelectorAll(".chat-assistant").length === count, {}, answers.length);
  const read = () => page.$$eval(".chat-assistant", (found) => found.map((each) => each.textContent.trim()));
  await page.waitForFunction(
    (text) => [...document.querySelectorAll(".chat-assistant")].at(-1).textContent.includes(text),
    { timeout: 60_000 },
    answers.at(-1),
  ).catch(async () => assert.deepEqual(await read(), answers));
}

const checks = {
  async an_uploaded_picture() {
    await page.goto(`${url}/?models=${encodeURIComponent(model)}`);
    await page.locator("::-p-text(Okay, Let's Go!)").click(); // the release notes
    await (await page.waitForSelector("input[type=file]")).uploadFile(picture);
    await page.waitForSelector('img[src^="data:image"], img[src*="/files/"]');
    await ask("What is this?", ["a red circle and a blue square"]);
  },
  async a_second_question() {
    await ask("How many shapes are there?", ["a red circle and a blue square", "two"]);
  },
};

try {
  for (const check of Object.values(checks)) {
    await check();
    console.log(`passed: ${check.name}`);
  }
} finally {
  if (screenshot) await page.screenshot({ path: screenshot });
  await browser.close();
}
