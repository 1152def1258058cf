// `serve` does for the JavaScript clients what loop.py does for those in Python. Its argument is the path of a module that exports
// what the code of docs/api.md defines.
import { createInterface } from "node:readline";

export const NAME = "get_weather";
export const DESCRIPTION = "The weather of a city.";
export const RESULT = "17 degrees";

export async function serve(cases) {
  const schema = JSON.parse(process.argv[3]);
  const names = await import(process.argv[2]);
  for await (const line of createInterface({ input: process.stdin })) {
    const command = JSON.parse(line);
    let answer = { text: "", calls: [], error: "" };
    try {
      Object.assign(answer, await cases[command.case](names, command, schema));
    } catch (error) {
      console.error(error);
      answer.error = `${error.name}: ${error.message}`;
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
  }
}
