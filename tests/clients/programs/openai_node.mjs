// OpenAI's client for JavaScript, with chat completions.
import { DESCRIPTION, NAME, RESULT, serve } from "./loop.mjs";

const fields = (command) => ({ model: command.model, temperature: 0, max_tokens: command.max_tokens });
const question = (command) => ({ role: "user", content: command.prompt });

async function plain({ client }, command) {
  const answer = await client.chat.completions.create({ messages: [question(command)], ...fields(command) });
  return { text: answer.choices[0].message.content };
}

async function stream({ client }, command) {
  let text = "";
  const events = await client.chat.completions.create({ messages: [question(command)], stream: true, ...fields(command) });
  for await (const event of events) text += event.choices[0]?.delta?.content ?? "";
  return { text };
}

async function tools({ client }, command, parameters) {
  const tools = [{ type: "function", function: { name: NAME, description: DESCRIPTION, parameters, strict: true } }];
  const choice = { type: "function", function: { name: NAME } };
  const asked = { messages: [question(command)], tools, tool_choice: choice, ...fields(command) };
  const message = (await client.chat.completions.stream(asked).finalChatCompletion()).choices[0].message;
  const calls = message.tool_calls.map((call) => ({ name: call.function.name, arguments: JSON.parse(call.function.arguments) }));
  const results = message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: RESULT }));
  const messages = [question(command), message, ...results];
  const answer = await client.chat.completions.create({ messages, tools, ...fields(command) });
  return { text: answer.choices[0].message.content, calls };
}

await serve({ plain, stream, tools });
