//! The checks of async-openai: `rust_clients URL MODEL`.

use async_openai::{config::OpenAIConfig, error::OpenAIError, types::*, Client};
use futures::StreamExt;
use serde_json::json;
use tokio::io::{copy_bidirectional, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const QUESTION: &str = "How is the weather in Paris?";

fn ask(model: &str, messages: serde_json::Value, tools: bool) -> CreateChatCompletionRequest {
    let mut body = json!({"model": model, "max_completion_tokens": 200, "messages": messages});
    if tools {
        let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        body["tools"] = json!([{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]);
    }
    serde_json::from_value(body).expect("a request")
}

fn question() -> serde_json::Value {
    json!([{"role": "user", "content": QUESTION}])
}

async fn text(client: &Client<OpenAIConfig>, model: &str) {
    let answer = client.chat().create(ask(model, question(), false)).await.expect("an answer");
    assert_eq!(answer.choices[0].message.content.as_deref(), Some("Yes."));
    assert!(answer.usage.expect("usage").completion_tokens > 0);
}

async fn stream(client: &Client<OpenAIConfig>, model: &str) {
    let mut request = ask(model, question(), false);
    request.stream_options = Some(ChatCompletionStreamOptions { include_usage: true });
    let mut chunks = client.chat().create_stream(request).await.expect("a stream");
    let (mut text, mut usage) = (String::new(), None);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.expect("a chunk");
        for choice in &chunk.choices {
            text += choice.delta.content.as_deref().unwrap_or("");
        }
        usage = chunk.usage.or(usage);
    }
    assert_eq!(text, "Yes.");
    assert!(usage.expect("usage").completion_tokens > 0);
}

async fn tool_loop(client: &Client<OpenAIConfig>, model: &str) {
    let answer = client.chat().create(ask(model, question(), true)).await.expect("an answer");
    let message = serde_json::to_value(&answer.choices[0].message).expect("a message");
    let call = &message["tool_calls"][0];
    assert!(call["function"]["arguments"].as_str().expect("arguments").contains("Paris"));
    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "21"});
    let messages = json!([{"role": "user", "content": QUESTION}, message, result]);
    let answer = client.chat().create(ask(model, messages, true)).await.expect("an answer");
    assert!(answer.choices[0].message.content.as_deref().unwrap_or("").contains("21"));
}

async fn abort(client: &Client<OpenAIConfig>, model: &str) {
    let mut chunks = client.chat().create_stream(ask(model, question(), false)).await.expect("a stream");
    chunks.next().await.expect("a chunk").expect("a chunk");
    drop(chunks);
    text(client, model).await;
}

/// The server answers 503 to the first connection, and passes the next one on.
async fn retry(url: &str, model: &str) {
    let address = url.split('/').nth(2).expect("an address").to_owned();
    let proxy = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let own = url.replace(&address, &proxy.local_addr().expect("its address").to_string());
    let serving = tokio::spawn(async move {
        let (mut first, _) = proxy.accept().await.expect("a connection");
        first.read(&mut [0; 65536]).await.expect("a request");
        let refusal = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        first.write_all(refusal).await.expect("an answer");
        drop(first);
        let (mut second, _) = proxy.accept().await.expect("a second connection");
        let mut engine = TcpStream::connect(address).await.expect("the gateway");
        let _ = copy_bidirectional(&mut second, &mut engine).await;
    });
    let client = Client::with_config(OpenAIConfig::new().with_api_base(own).with_api_key("none"));
    text(&client, model).await;
    serving.abort();
}

async fn errors(client: &Client<OpenAIConfig>) {
    match client.chat().create(ask("no-such-model", question(), false)).await {
        Err(OpenAIError::ApiError(error)) => assert!(error.message.contains("not served here"), "{error}"),
        other => panic!("the model does not exist: {other:?}"),
    }
}

#[tokio::main]
async fn main() {
    let words: Vec<String> = std::env::args().collect();
    let config = OpenAIConfig::new().with_api_base(&words[1]).with_api_key("none");
    let client = Client::with_config(config);
    text(&client, &words[2]).await;
    println!("passed: text");
    stream(&client, &words[2]).await;
    println!("passed: stream");
    tool_loop(&client, &words[2]).await;
    println!("passed: tool_loop");
    abort(&client, &words[2]).await;
    println!("passed: abort");
    retry(&words[1], &words[2]).await;
    println!("passed: retry");
    errors(&client).await;
    println!("passed: errors");
}
