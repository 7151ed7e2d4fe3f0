// A visit to the console in headless Chromium. For programs that run in the folder with the packages.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

export class Visit {
  // PICTURES is the folder for pictures. A request to another host counts as one of the `failures`.
  static async begin(url, pictures) {
    const packages = createRequire(`${process.cwd()}/`);
    const puppeteer = packages("puppeteer-core");
    const { default: chromium } = await import(packages.resolve("@sparticuz/chromium"));
    const browser = await puppeteer.launch({
      args: chromium.args.filter((flag) => !flag.includes("web-security")),
      executablePath: await chromium.executablePath(),
      headless: "shell",
    });
    const page = await browser.newPage();
    const failures = [];
    page.on("pageerror", (error) => failures.push(error.message));
    page.on("console", (message) => message.type() === "error" && failures.push(message.text()));
    page.on("request", (request) => {
      if (!request.url().startsWith(`${url}/`) && !request.url().startsWith("data:")) failures.push(`loads ${request.url()}`);
      setTimeout(() => request.continue(), request.url().endsWith("/hx-sse.min.js") ? 500 : 0); // a slow network
    });
    await page.setRequestInterception(true);
    return Object.assign(new Visit(), { url, pictures, browser, page, failures });
  }

  // Raises an error if there were failures. Those that contain the text EXPECTED do not count.
  async end(expected = "") {
    await this.browser.close();
    assert.deepEqual(this.failures.filter((each) => !expected || !each.includes(expected)), []);
  }

  open(path) {
    return this.page.goto(`${this.url}${path}`);
  }

  // Clicks on something that leads to another page; without a selector, presses Enter.
  follow(selector) {
    return Promise.all([this.page.waitForNavigation(), selector ? this.page.click(selector) : this.page.keyboard.press("Enter")]);
  }

  path() {
    return new URL(this.page.url()).pathname;
  }

  text(selector) {
    return this.page.$eval(selector, (found) => found.textContent);
  }

  async signIn(token) {
    assert.equal(this.path(), "/sign-in");
    await this.page.type("#token", token);
    await this.follow();
    assert.equal(this.path(), "/");
  }

  async look(name) {
    for (const scheme of ["light", "dark"]) {
      await this.page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      for (const width of [390, 1440]) {
        await this.page.setViewport({ width, height: width < 1000 ? 844 : 900 });
        const wide = await this.page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
        assert.ok(wide <= 0, `${name} at ${width} is ${wide} pixels too wide`);
        await this.page.screenshot({ path: `${this.pictures}/${name}-${scheme}-${width}.png`, fullPage: true });
      }
    }
  }

  async checkNames(name) {
    const unnamed = await this.page.$$eval("input:not([type=hidden]), textarea, select, button, a, svg, table th", (elements) =>
      elements.filter((each) => !each.labels?.length && !each.ariaLabel && !each.textContent.trim()).map((each) => each.outerHTML),
    );
    assert.deepEqual(unnamed, [], `elements of ${name} without a name for screen readers`);
  }

  // Sends the form of the page for trying a service that generates. Returns when the text has come in PIECES.
  async watchAnswer(maxTokens, pieces) {
    await this.page.$eval("#max_tokens", (field, value) => (field.value = value), maxTokens);
    await this.page.evaluate(() => {
      window.lengths = new Set(); // of the text: an answer may have ended before somebody looks twice
      const note = () => window.lengths.add(document.querySelector("#text")?.textContent.length || 0);
      new MutationObserver(note).observe(document.querySelector("main"), { childList: true, subtree: true });
    });
    await this.page.click("#try button");
    await this.page.waitForFunction((pieces) => window.lengths.size > pieces, {}, pieces); // with the length 0
  }
}
