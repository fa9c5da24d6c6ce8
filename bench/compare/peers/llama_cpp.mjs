// llama.cpp by the prebuilt package node-llama-cpp: `node llama_cpp.mjs JSON`, the settings of _llama_cpp.py.
// Prints {} once the file is loaded, then answers a line {prompt, n} with a line {token_ids, arrivals}.
import {createInterface} from "node:readline";

const N_DRAFTED = 6;
const GREEDY = {temperature: 0, yieldEogToken: true};
const asked = JSON.parse(process.argv[2]);
const {getLlama} = await import(asked.package);
const llama = await getLlama({gpu: false, build: "never", maxThreads: asked.threads});

async function open(path) {
    const model = await llama.loadModel({modelPath: path, useMmap: asked.mapped});
    const sizes = {contextSize: asked.max_len, batchSize: 512, threads: asked.threads};
    return [model, (await model.createContext(sizes)).getSequence()];
}

const [model, target] = await open(asked.path);
const draft = asked.draft && (await open(asked.draft))[1];

async function* plain(prompt) {
    for await (const token of target.evaluate(prompt, GREEDY))
        yield [token];
}

// Verifies a chain per pass. The package's own token predictor drafts from a stale state after a
// rejection: with the target as its draft it accepts one token of six.
async function* assisted(prompt) {
    const tokens = [...prompt];
    while (true) {
        const chain = [];
        for await (const token of draft.evaluate(tokens.slice(draft.nextTokenIndex), GREEDY))
            if (chain.push(token) === N_DRAFTED)
                break;
        const rows = [...tokens.slice(target.nextTokenIndex), ...chain];
        const first = rows.length - chain.length - 1;
        const next = {generateNext: {token: true, options: {temperature: 0}}};
        const results = await target.controlledEvaluate(rows.map((token, i) => i < first ? token : [token, next]));
        const predicted = results.slice(first).map((result) => result.next.token);
        const refuted = chain.findIndex((token, i) => token !== predicted[i]);
        const fresh = refuted < 0 ? predicted : predicted.slice(0, refuted + 1);
        tokens.push(...fresh);
        for (const sequence of [target, draft])
            if (sequence.nextTokenIndex >= tokens.length)
                await sequence.eraseContextTokenRanges([{start: tokens.length - 1, end: sequence.nextTokenIndex}]);
        yield fresh;
    }
}

console.log("{}");
for await (const line of createInterface({input: process.stdin})) {
    const {prompt, n} = JSON.parse(line);
    await target.clearHistory();
    await draft?.clearHistory();
    const [ids, arrivals, started] = [[], [], performance.now()];
    for await (const fresh of (draft ? assisted : plain)(prompt)) {
        const end = fresh.findIndex((token) => model.isEogToken(token));
        ids.push(...(end < 0 ? fresh : fresh.slice(0, end + 1)).slice(0, n - ids.length));
        arrivals.push([(performance.now() - started) / 1000, ids.length]);
        if (ids.length === n || end >= 0)
            break;
    }
    console.log(JSON.stringify({token_ids: ids, arrivals}));
}
process.exit(0);
