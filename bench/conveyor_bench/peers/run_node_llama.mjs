// llama.cpp with drafts as a system of the bench: `node run_node_llama.mjs MODEL THREADS METHOD [DRAFT]`.
//
// MODEL and DRAFT are GGUF files. METHOD is `plain`, `lookup` or `draft`. node-llama-cpp brings a build of llama.cpp
// that has kernels for each kind of CPU, and guesses by itself: llama.cpp's library has no drafts.
// Called by `process`, which describes the protocol. Requests are sequences of one context.
import readline from "node:readline";
import {DraftSequenceTokenPredictor, InputLookupTokenPredictor, getLlama} from "node-llama-cpp";

const MAX_DRAFTS = 8;
const PATTERN = 3; // tokens that must be equal before a guess
const [path, threads, method, draftPath] = process.argv.slice(2);
const llama = await getLlama({build: "never", gpu: false, maxThreads: Number(threads), logLevel: "error"});
const model = await llama.loadModel({modelPath: path});
const draftModel = method === "draft" ? await llama.loadModel({modelPath: draftPath}) : undefined;

async function open(loaded, prompts, outputTokens) {
    const longest = Math.max(...prompts.map((prompt) => prompt.length)) + outputTokens + MAX_DRAFTS + 1;
    const contextSize = Math.ceil(longest / 256) * 256;
    return await loaded.createContext({contextSize, sequences: prompts.length, threads: Number(threads)});
}

function predict(prompt, drafts) {
    if (method === "lookup")
        return new InputLookupTokenPredictor({
            patternLength: {min: PATTERN}, predictionLength: {max: MAX_DRAFTS}
        });
    if (method === "draft")
        return new DraftSequenceTokenPredictor(drafts.getSequence(), {maxTokens: MAX_DRAFTS, minConfidence: 0});
    return undefined;
}

async function* run(prompts, outputTokens) {
    const context = await open(model, prompts, outputTokens);
    const drafts = draftModel && await open(draftModel, prompts, outputTokens);
    const rows = prompts.map(() => []);
    const streams = prompts.map((prompt) => {
        const tokenPredictor = predict(prompt, drafts);
        tokenPredictor?.updateInputTokens?.(prompt);
        return context.getSequence({tokenPredictor}).evaluate(prompt, {temperature: 0, yieldEogToken: true});
    });
    yield 0;
    while (rows.some((row) => row.length < outputTokens)) {
        await Promise.all(rows.map(async (row, number) => {
            if (row.length < outputTokens)
                row.push((await streams[number].next()).value);
        }));
        yield rows.map((row) => row.length);
    }
    await Promise.all(streams.map((stream) => stream.return()));
    await context.dispose();
    await drafts?.dispose();
    yield rows;
}

let current;
for await (const line of readline.createInterface({input: process.stdin})) {
    const question = JSON.parse(line);
    if (question !== null)
        current = run(question.prompts, question.output_tokens);
    console.log(JSON.stringify((await current.next()).value));
}
process.exit(0);
