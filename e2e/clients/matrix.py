"""All clients that are tested, with their versions and the commands that are run.

docs/openai-api.md has a row for each client. In a command, `{env}` is the client's environment, `{url}` the OpenAI base
URL, `{base}` the same without `/v1`, `{model}` the model's name, and `{out}` an empty folder. `{tokenizer}` is a local
folder, so that no client downloads a tokenizer.
"""

from e2e.clients import reports
from e2e.clients.client import PROGRAMS, Client, Task, python
from e2e.clients.scripted import SCRIPTED
from e2e.peers_tests import source

BROWSER = ("npm:@sparticuz/chromium@147.0.0", "npm:puppeteer-core@24.43.1")
PAGE_ORIGIN = "http://localhost:8000"  # of the page in the browser; the gateway must allow it
OPEN_WEBUI = ("open-webui==0.12.4", "torch==2.15.0", *BROWSER)
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

LITELLM = ("litellm==1.106.2", "mcp==2.3.0")  # litellm imports mcp for a request with tools, but does not install it


def _tei_client(task: Task) -> Client:
    """Return the row of text-embeddings-inference's client for a task."""
    ran = {"embed": "vectors, async", "rerank": "ranks with their texts", "classify": "scores of all labels"}[task]
    return Client(
        f"tei-client, {task}",
        ("tei-client==0.2.4",),
        python("tei_client_python.py"),
        f"the model's description, {ran}, tokens",
        task=task,
    )


def _vllm_bench(backend: str, path: str, ran: str, *options: str, task: Task = "generate") -> Client:
    """Return the row of one backend of `vllm bench serve`, with 20 requests, four at once.

    It runs from vLLM's source, which `make peers-tests` downloads too, without vLLM's compiled parts.
    """
    return Client(
        f"vllm bench serve, {backend}",
        (f"vllm=={source.VERSION}",),
        (
            "{env}/bin/python", "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend,
            "--base-url", "{base}", "--endpoint", path, "--model", "{model}", "--tokenizer", "{tokenizer}",
            "--max-concurrency", "4", "--random-input-len", "64", "--random-output-len", "16", *options,
            "--save-result", "--save-detailed", "--result-dir", "{out}", "--result-filename", "report.json",
            "--disable-tqdm",
        ),
        ran,
        reports.vllm_bench,
        OFFLINE | {"VLLM_NO_USAGE_STATS": "1"},
        source.FOLDER / f"vllm-{source.VERSION}",
        task,
        source.provide,
    )  # fmt: skip


CLIENTS = (
    Client(
        "openai (Python)",
        ("openai==3.54.0",),
        python("openai_python.py"),
        "models, chat, streams, the SDK's stream helper, log probabilities, completions, a call and its result, "
        "a schema, eight at once, an abort, a retry, errors",
    ),
    Client(
        "openai (Node)",
        ("npm:openai@7.57.0",),
        ("node", str(PROGRAMS / "openai_node.mjs"), "{url}", "{model}"),
        "models, chat, streams, the SDK's stream helper, completions, a call and its result, a schema, an abort, "
        "a retry, errors",
    ),
    Client(
        "openai (Python), responses",
        ("openai==3.54.0",),
        python("openai_responses.py"),
        "responses, streams, the SDK's stream helper, parsed answers, a tool call, its result, eight at once, "
        "an abort, a retry, errors",
    ),
    Client(
        "openai-agents",
        ("openai-agents==0.24.0",),
        python("openai_agents.py"),
        "an agent's answer, streamed too, an output type, a tool that is called and its result, an abort, a retry",
    ),
    Client(
        "anthropic",
        ("anthropic==2.14.0",),
        python("anthropic_python.py"),
        "messages, streams, a call of a tool and its result, a schema, token counts, eight at once, an abort, a retry, "
        "errors",
    ),
    Client(
        "guidellm",
        ("guidellm==0.8.1", "torch==2.15.0"),  # the engine's torch: its gigabytes are on this machine already
        (
            "{env}/bin/guidellm", "run", "--backend", "kind=openai_http,target={base},model={model}",
            "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=20",
            "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            "--tokenizer", "kind=hf_auto,model={tokenizer}",
            "--output", "kind=json,path={out}/report.json", "--disable-console-interactive",
        ),
        "`guidellm run` with synthetic chats, streamed, four at once",
        reports.guidellm,
        OFFLINE,
    ),
    Client(
        "aiperf",
        ("aiperf==0.13.0",),
        (
            "{env}/bin/aiperf", "profile", "--model", "{model}", "--url", "{base}", "--endpoint-type", "chat",
            "--streaming", "--concurrency", "4", "--request-count", "20", "--isl", "64", "--osl", "16",
            "--tokenizer", "{tokenizer}", "--use-server-token-count", "--per-chunk-usage",
            "--artifact-dir", "{out}", "--ui", "none",
        ),
        "`aiperf profile` with synthetic chats, streamed, token counts from each chunk, four at once",
        reports.aiperf,
    ),
    _vllm_bench("openai", "/v1/completions", "random prompts, streamed, four at once", "--num-prompts", "20"),
    _vllm_bench("openai-chat", "/v1/chat/completions", "random chats, streamed, four at once", "--num-prompts", "20"),
    _vllm_bench("openai-responses", "/v1/responses", "random inputs, streamed, four at once", "--num-prompts", "20"),
    Client(
        "litellm",
        LITELLM,
        python("litellm_python.py"),
        "chat and streams as `openai/` and `hosted_vllm/`, text completion, router, text parts with `cache_control`, "
        "context overflow, a tool, a schema, a fallback for long prompts, Anthropic's adapter, an abort, a retry, "
        "errors",
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Client(
        "langchain-openai",
        ("langchain-openai==1.7.3",),
        python("langchain_python.py"),
        "`ChatOpenAI`: invoke, stream, batch, async, a chain, an abort, a retry; `OpenAI`: invoke",
    ),
    Client(
        "llama-index OpenAILike",
        ("llama-index-llms-openai-like==0.8.1",),
        python("llama_index_python.py"),
        "chat, complete, both streamed, async, an abort, a retry",
    ),
    Client(
        "lm-eval",
        ("lm-eval[api,hf]==0.4.13", "transformers==5.23.0", "torch==2.15.0"),
        (
            "{env}/bin/lm_eval", "run", "--model", "local-completions", "--model_args",
            "model={model},base_url={url}/completions,tokenizer={tokenizer},num_concurrent=2,tokenized_requests=False",
            "--tasks", "conveyor_generate", "--include_path", ".", "--output_path", "{out}",
        ),
        "`local-completions`, a `generate_until` task",
        reports.lm_eval,
        OFFLINE,
        PROGRAMS / "lm_eval_tasks",
    ),
    Client(
        "instructor",
        ("instructor==1.17.0",),
        python("instructor_python.py"),
        "modes `TOOLS`, `TOOLS_STRICT`, `JSON_SCHEMA` and `MD_JSON`, partial answers, lists, async, a retry",
    ),
    Client(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]==2.68.0",),
        python("pydantic_ai_python.py"),
        "text, streams, output by tool, native and prompted, a tool and its result, an abort, a retry; over chat and "
        "responses",
    ),
    Client(
        "langgraph",
        ("langgraph==1.2.24", "langchain-openai==1.7.3"),
        python("langgraph_python.py"),
        "`with_structured_output`, bound tools, whole and streamed, a graph with a tool, its stream",
    ),
    Client(
        "llama-index, agents",
        ("llama-index-llms-openai-like==0.8.1",),
        python("llama_index_agent.py"),
        "structured predictions, a required call, its result, an agent with a tool",
    ),
    Client(
        "outlines",
        ("outlines[openai]==1.3.3",),
        python("outlines_python.py"),
        "text, streams, a schema, a regular expression, a choice, a grammar, an abort, a retry",
    ),
    Client(
        "dspy",
        ("dspy==3.4.1",),
        python("dspy_python.py"),
        "a text, predictions with `JSONAdapter`, several at once, a retry",
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Client(
        "open-webui",
        OPEN_WEBUI,
        python("open_webui_python.py"),
        "models and a streamed conversation through its server, as its page sends them",
    ),
    Client(
        "lm-eval, likelihoods",
        ("lm-eval[api,hf]==0.4.13", "transformers==5.23.0", "torch==2.15.0"),
        (*python("lm_eval_choices.py"), "{tokenizer}"),
        "`local-completions`, a task of log likelihoods, compared with lm-eval's transformers backend",
        environment=OFFLINE,
        folder=PROGRAMS / "lm_eval_tasks",
    ),
    Client(
        "openai (Python), embeddings",
        ("openai==3.54.0",),
        python("openai_embeddings.py"),
        "one text, several, token ids, both encodings, eight at once, errors",
        task="embed",
    ),
    Client(
        "openai (Node), embeddings",
        ("npm:openai@7.57.0",),
        ("node", str(PROGRAMS / "openai_embeddings.mjs"), "{url}", "{model}"),
        "one text, several, both encodings, errors",
        task="embed",
    ),
    Client(
        "aiperf, embeddings",
        ("aiperf==0.13.0",),
        (
            "{env}/bin/aiperf", "profile", "--model", "{model}", "--url", "{base}", "--endpoint-type", "embeddings",
            "--concurrency", "4", "--request-count", "20", "--isl", "64", "--tokenizer", "{tokenizer}",
            "--artifact-dir", "{out}", "--ui", "none",
        ),
        "`aiperf profile` with synthetic texts, four at once",
        reports.aiperf,
        task="embed",
    ),
    _vllm_bench(
        "openai-embeddings", "/v1/embeddings", "four random texts in each request, four at once",
        "--num-prompts", "80", "--random-batch-size", "4", task="embed",
    ),
    _vllm_bench(
        "vllm-rerank", "/v1/rerank", "a query and five random documents in each request, four at once",
        "--dataset-name", "random-rerank", "--num-prompts", "100", "--random-batch-size", "5", task="rerank",
    ),
    Client(
        "litellm, embeddings",
        LITELLM,
        python("litellm_embeddings.py"),
        "`embedding` as `openai/` and `hosted_vllm/`, async, errors",
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        task="embed",
    ),
    Client(
        "langchain-openai, embeddings",
        ("langchain-openai==1.7.3",),
        python("langchain_embeddings.py"),
        "`OpenAIEmbeddings(check_embedding_ctx_length=False)`: a query, documents, async",
        task="embed",
    ),
    Client(
        "llama-index OpenAILikeEmbedding",
        ("llama-index-embeddings-openai-like==0.4.0",),
        python("llama_index_embeddings.py"),
        "a query, a text, a batch, async",
        task="embed",
    ),
    Client(
        "huggingface_hub",
        ("huggingface-hub==2.4.0", "numpy"),
        python("huggingface_hub_python.py"),
        "`InferenceClient` with the URL of `/embed`: one text, several, async, errors",
        task="embed",
    ),
    *(_tei_client(task) for task in ("embed", "rerank", "classify")),
    Client(
        "infinity_client",
        ("infinity-client==0.0.78",),
        python("infinity_embeddings.py"),
        "health, one text, several, async, errors",
        task="embed",
    ),
    Client(
        "infinity_client, rerank",
        ("infinity-client==0.0.78",),
        python("infinity_rerank.py"),
        "ranks, the best document with its text, async, errors",
        task="rerank",
    ),
    Client(
        "kserve",
        ("kserve==0.21.0",),
        python("kserve_python.py"),
        "Open Inference Protocol: readiness, tensors in JSON and as bytes, each row alone, errors",
        task="compute",
    ),
    Client(
        "openai (Python), audio",
        ("openai==3.54.0",),
        python("openai_audio.py"),
        "transcriptions as `json`, `verbose_json`, `srt`, `vtt`, `text` and streamed, translations, errors",
        task="transcribe",
    ),
    Client(
        "litellm, audio",
        LITELLM,
        python("litellm_audio.py"),
        "`transcription` as `openai/` and `hosted_vllm/`, with segments, async, errors",
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        task="transcribe",
    ),
    Client(
        "Chromium, audio",
        BROWSER,
        ("node", str(PROGRAMS / "browser_page.mjs"), "{url}", "{model}", "speech"),
        "`examples/speech-and-pictures.html`: a file, its transcript streamed, its segments, errors",
        task="transcribe",
    ),
    Client(
        "openai (Python), images",
        ("openai==3.54.0", "pillow==13.0.0"),
        python("openai_images.py"),
        "one picture, several, previews in a stream, edits, errors",
        task="paint",
    ),
    Client(
        "openai (Node), images",
        ("npm:openai@7.57.0",),
        ("node", str(PROGRAMS / "openai_images.mjs"), "{url}", "{model}"),
        "one picture, an edit, an edit in a stream, errors",
        task="paint",
    ),
    Client(
        "litellm, images",
        LITELLM,
        python("litellm_images.py"),
        "`image_generation`, several, async, errors",
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        task="paint",
    ),
    Client(
        "Chromium, images",
        BROWSER,
        ("node", str(PROGRAMS / "browser_page.mjs"), "{url}", "{model}", "pictures"),
        "`examples/speech-and-pictures.html`: a prompt, its previews and its picture, errors",
        task="paint",
    ),
    Client(
        "openai (Python), images in chats",
        ("openai==3.54.0",),
        python("openai_sight.py"),
        "a picture, a conversation about it, streamed, several pictures, responses, errors",
        task="see",
    ),
    Client(
        "anthropic, images in chats",
        ("anthropic==2.14.0",),
        python("anthropic_sight.py"),
        "a picture with its tokens, a conversation about it, streamed, a picture from a tool, errors",
        task="see",
    ),
    Client(
        "langchain-openai, images in chats",
        ("langchain-openai==1.7.3",),
        python("langchain_sight.py"),
        "a picture as LangChain's block and as OpenAI's part, a conversation about it, streamed, batch, async",
        task="see",
    ),
    Client(
        "open-webui, images in chats",
        OPEN_WEBUI,
        python("open_webui_sight.py"),
        "its page in Chromium: an uploaded picture, a question about it, a second question",
        task="see",
    ),
    *SCRIPTED,
)  # fmt: skip
