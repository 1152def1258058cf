// Vercel's AI SDK.
import { generateText, isStepCount, jsonSchema, streamText, tool } from "ai";

import { DESCRIPTION, NAME, RESULT, serve } from "./loop.mjs";

const fields = (model, command) => ({ model, prompt: command.prompt, temperature: 0, maxOutputTokens: command.max_tokens });

async function plain({ model }, command) {
  return { text: (await generateText(fields(model, command))).text };
}

async function stream({ model }, command) {
  let text = "";
  let failure;
  const result = streamText({ ...fields(model, command), onError: ({ error }) => (failure = error) });
  for await (const part of result.textStream) text += part;
  if (failure) throw failure;
  return { text };
}

async function tools({ model }, command, parameters) {
  let failure;
  const weather = tool({ description: DESCRIPTION, inputSchema: jsonSchema(parameters), strict: true, execute: () => RESULT });
  const result = streamText({
    ...fields(model, command),
    tools: { [NAME]: weather },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: NAME } : "auto" }),
    stopWhen: isStepCount(2),
    onError: ({ error }) => (failure = error),
  });
  for await (const _ of result.fullStream);
  if (failure) throw failure;
  const calls = (await result.steps).flatMap((step) => step.toolCalls);
  return { text: await result.text, calls: calls.map((call) => ({ name: call.toolName, arguments: call.input })) };
}

await serve({ plain, stream, tools });
