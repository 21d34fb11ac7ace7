// `make axe`: axe's findings on pages of the site and on reports, at two widths, in light and dark. Exits with 1 if there are any.
// Usage: node axe.mjs FOLDER_WITH_NODE_MODULES PAGE...
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, ...pages] = process.argv.slice(2);
const required = createRequire(resolve(folder, "package.json"));
const at = async (name) => { const module = await import(pathToFileURL(required.resolve(name))); return module.default ?? module; };
const chromium = await at("@sparticuz/chromium"), playwright = await at("playwright-core");
const axe = readFileSync(required.resolve("axe-core/axe.min.js"), "utf8");
const args = [...chromium.args.filter((each) => !each.includes("single-process")), "--no-sandbox"];
const browser = await playwright.chromium.launch({ executablePath: await chromium.executablePath(), args, headless: true });
const findings = new Map();
for (const colorScheme of ["light", "dark"]) {
  for (const width of [1280, 390]) {
    const context = await browser.newContext({ colorScheme, viewport: { width, height: 900 } });
    for (const file of pages) {
      const page = await context.newPage();
      await page.goto(pathToFileURL(resolve(file)).href);
      await page.waitForSelector("h1");
      await page.waitForTimeout(400); // for what scripts add
      await page.addScriptTag({ content: axe });
      const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
      for (const { id, impact, nodes } of violations) {
        for (const node of nodes) {
          const what = `${id} (${impact}) ${node.target.join(" ").slice(0, 100)} in ${file}`;
          findings.set(what, `${node.any[0]?.message ?? ""}`.slice(0, 160));
        }
      }
      await page.close();
    }
    await context.close();
  }
}
await browser.close();
for (const [what, why] of findings) console.log(`${what}: ${why}`);
console.log(`${pages.length} pages, ${findings.size} findings`);
process.exit(findings.size ? 1 : 0);
