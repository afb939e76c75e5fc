// Streams one answer from a Baton router. The stubs are made from proto/baton/v1 when the program starts.
//
//     npm install
//     node client.js 127.0.0.1:50051 "The color of dog"
//
// BATON_TOKEN: a bearer token. BATON_CA: the file of a certificate authority, for TLS.
// Exit codes are those of the `baton` command: 2 wrong request, 4 unreachable, 5 overloaded, 130 cancelled.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTO = path.join(__dirname, "..", "..", "proto");
const TIMEOUT_MS = 60_000;
const EXIT_CODES = {
  [grpc.status.INVALID_ARGUMENT]: 2,
  [grpc.status.NOT_FOUND]: 2,
  [grpc.status.UNAVAILABLE]: 4,
  [grpc.status.RESOURCE_EXHAUSTED]: 5,
  [grpc.status.CANCELLED]: 130,
};

// keepCase: names as in the proto files; oneofs: `event.event` names the field that is set.
function connect(target) {
  const files = protoLoader.loadSync("baton/v1/inference.proto", {
    includeDirs: [PROTO],
    keepCase: true,
    longs: Number,
    enums: String,
    defaults: true,
    oneofs: true,
  });
  const { Inference } = grpc.loadPackageDefinition(files).baton.v1;
  const ca = process.env.BATON_CA;
  const credentials = ca ? grpc.credentials.createSsl(fs.readFileSync(ca)) : grpc.credentials.createInsecure();
  return new Inference(target, credentials);
}

function metadata() {
  const made = new grpc.Metadata();
  if (process.env.BATON_TOKEN) made.set("authorization", `Bearer ${process.env.BATON_TOKEN}`);
  return made;
}

// Calls onText with each piece of text. Resolves with the usage; rejects with gRPC's error.
function generate(client, request, onText) {
  return new Promise((resolve, reject) => {
    const deadline = new Date(Date.now() + TIMEOUT_MS);
    const call = client.Generate(request, metadata(), { deadline });
    process.once("SIGINT", () => call.cancel()); // the server stops immediately and frees its blocks
    let expected = 0;
    let completed = null;
    call.on("data", (event) => {
      if (event.seq !== expected++) {
        reject(new Error(`event ${event.seq} came where ${expected - 1} was due`));
        return call.cancel();
      }
      if (event.event === "tokens") onText(event.tokens.text);
      if (event.event === "completed") completed = event.completed;
    });
    call.on("error", reject);
    call.on("end", () => (completed ? resolve(completed.usage) : reject(new Error("the stream ended early"))));
  });
}

async function main() {
  const [target, prompt, maxTokens = "16"] = process.argv.slice(2);
  if (!target || prompt === undefined) {
    console.error("usage: node client.js HOST:PORT PROMPT [MAX_TOKENS]");
    return 2;
  }
  const client = connect(target);
  try {
    const request = { text: prompt, sampling: { max_tokens: Number(maxTokens), temperature: 0 } };
    const usage = await generate(client, request, (text) => process.stdout.write(text));
    console.log(`\n${usage.prompt_tokens} prompt tokens, ${usage.completion_tokens} new ones`);
    return 0;
  } catch (error) {
    console.error(`${grpc.status[error.code] ?? "ERROR"}: ${error.details ?? error.message}`);
    return EXIT_CODES[error.code] ?? 1;
  } finally {
    client.close();
  }
}

main().then((code) => (process.exitCode = code));
