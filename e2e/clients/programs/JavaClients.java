import com.openai.client.OpenAIClient;
import com.openai.client.okhttp.OpenAIOkHttpClient;
import com.openai.core.JsonValue;
import com.openai.errors.NotFoundException;
import com.openai.helpers.ChatCompletionAccumulator;
import com.openai.models.chat.completions.*;
import com.sun.net.httpserver.HttpServer;
import dev.langchain4j.agent.tool.Tool;
import dev.langchain4j.memory.chat.MessageWindowChatMemory;
import dev.langchain4j.model.chat.response.*;
import dev.langchain4j.model.openai.*;
import dev.langchain4j.service.*;
import java.net.*;
import java.net.http.*;
import java.util.*;
import java.util.concurrent.*;

/** The checks of the clients for Java: `java JavaClients KIND URL MODEL`. */
public class JavaClients {
    static String url, model;
    static final String QUESTION = "How is the weather in Paris?";
    static final List<String> CITIES = Collections.synchronizedList(new ArrayList<>());

    interface Check { void run() throws Exception; }

    static void check(String name, Check check) throws Exception {
        check.run();
        System.out.println("passed: " + name);
    }

    static void expect(boolean holds, Object seen) {
        if (!holds) throw new AssertionError(String.valueOf(seen));
    }

    /** Checks with a server that answers 503 once, and then passes requests on. */
    static void behindAnOverloadedProxy(Check check) throws Exception {
        String own = url;
        HttpServer proxy = HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
        List<String> seen = new ArrayList<>();
        proxy.createContext("/", exchange -> {
            byte[] body = exchange.getRequestBody().readAllBytes();
            String path = exchange.getRequestURI().getPath();
            seen.add(path);
            int status = 503;
            byte[] answer = {};
            if (seen.size() > 1) {
                HttpRequest passed = HttpRequest.newBuilder(URI.create(own.replaceAll("/v1$", "") + path))
                    .header("Content-Type", "application/json").POST(HttpRequest.BodyPublishers.ofByteArray(body)).build();
                HttpResponse<byte[]> got = HttpClient.newHttpClient().sendAsync(passed, HttpResponse.BodyHandlers.ofByteArray()).join();
                status = got.statusCode();
                answer = got.body();
                exchange.getResponseHeaders().add("Content-Type", got.headers().firstValue("Content-Type").get());
            }
            exchange.sendResponseHeaders(status, answer.length == 0 ? -1 : answer.length);
            exchange.getResponseBody().write(answer);
            exchange.close();
        });
        proxy.start();
        url = "http://127.0.0.1:" + proxy.getAddress().getPort() + "/v1";
        check.run();
        expect(seen.size() == 2, seen);
        url = own;
        proxy.stop(0);
    }

    // openai-java

    static OpenAIClient openai() {
        return OpenAIOkHttpClient.builder().baseUrl(url).apiKey("none").maxRetries(1).build();
    }

    static ChatCompletionCreateParams.Builder ask(String name) {
        return ChatCompletionCreateParams.builder().model(name).maxCompletionTokens(200).addUserMessage(QUESTION);
    }

    static class GetWeather {
        public String city;
    }

    static void openaiText() {
        ChatCompletion answer = openai().chat().completions().create(ask(model).build());
        expect(answer.choices().get(0).message().content().get().equals("Yes."), answer);
    }

    static void openaiStream() {
        ChatCompletionAccumulator all = ChatCompletionAccumulator.create();
        ChatCompletionStreamOptions options = ChatCompletionStreamOptions.builder().includeUsage(true).build();
        try (var stream = openai().chat().completions().createStreaming(ask(model).streamOptions(options).build())) {
            stream.stream().forEach(all::accumulate);
        }
        expect(all.chatCompletion().choices().get(0).message().content().get().equals("Yes."), all.chatCompletion());
        expect(all.chatCompletion().usage().get().completionTokens() > 0, all.chatCompletion());
    }

    static ChatCompletionCreateParams.Builder askWithTool() {
        Map<String, Object> schema = Map.of("type", "object", "properties", Map.of("city", Map.of("type", "string")));
        com.openai.models.FunctionDefinition function = com.openai.models.FunctionDefinition.builder().name("get_weather")
            .parameters(com.openai.models.FunctionParameters.builder()
                .putAllAdditionalProperties(JsonValue.from(schema).convert(new com.fasterxml.jackson.core.type.TypeReference<Map<String, JsonValue>>() {})).build())
            .build();
        return ask(model).addTool(ChatCompletionFunctionTool.builder().function(function).build());
    }

    static void openaiToolLoop() {
        var params = askWithTool();
        ChatCompletionMessage message = openai().chat().completions().create(params.build()).choices().get(0).message();
        ChatCompletionMessageFunctionToolCall call = message.toolCalls().get().get(0).asFunction();
        expect(call.function().arguments().contains("Paris"), call);
        params.addMessage(message).addMessage(ChatCompletionToolMessageParam.builder().toolCallId(call.id()).content("21").build());
        ChatCompletion answer = openai().chat().completions().create(params.build());
        expect(answer.choices().get(0).message().content().get().contains("21"), answer);
    }

    static void openaiAbort() {
        try (var stream = openai().chat().completions().createStreaming(ask(model).build())) {
            stream.stream().findFirst();
        }
        openaiText();
    }

    static void openaiErrors() {
        try {
            openai().chat().completions().create(ask("no-such-model").build());
        } catch (NotFoundException error) {
            return;
        }
        throw new AssertionError("the model does not exist");
    }

    // LangChain4j

    static class Weather {
        @Tool("The weather.")
        public int get_weather(String city) {
            CITIES.add(city);
            return 21;
        }
    }

    interface Assistant {
        String chat(String text);
    }

    interface Streamed {
        TokenStream chat(String text);
    }

    static OpenAiChatModel chat(String name) {
        return OpenAiChatModel.builder().baseUrl(url).apiKey("none").modelName(name).maxTokens(200).maxRetries(1).build();
    }

    static OpenAiStreamingChatModel streaming() {
        return OpenAiStreamingChatModel.builder().baseUrl(url).apiKey("none").modelName(model).maxTokens(200).build();
    }

    static String read(TokenStream stream) throws Exception {
        CompletableFuture<ChatResponse> done = new CompletableFuture<>();
        stream.onPartialResponse(text -> { }).onCompleteResponse(done::complete).onError(done::completeExceptionally).start();
        ChatResponse response = done.get(60, TimeUnit.SECONDS);
        expect(response.tokenUsage().outputTokenCount() > 0, response);
        return response.aiMessage().text();
    }

    static void lc4jText() {
        expect(chat(model).chat(QUESTION).equals("Yes."), "");
    }

    static void lc4jStream() throws Exception {
        String text = read(AiServices.builder(Streamed.class).streamingChatModel(streaming()).build().chat(QUESTION));
        expect(text.equals("Yes."), text);
    }

    static void lc4jToolLoop() {
        CITIES.clear();
        String text = AiServices.builder(Assistant.class).chatModel(chat(model)).tools(new Weather()).build().chat(QUESTION);
        expect(CITIES.equals(List.of("Paris")) && text.contains("21"), CITIES + text);
    }

    static void lc4jToolLoopStreamed() throws Exception {
        CITIES.clear();
        String text = read(AiServices.builder(Streamed.class).streamingChatModel(streaming()).tools(new Weather()).build().chat(QUESTION));
        expect(CITIES.equals(List.of("Paris")) && text.contains("21"), CITIES + text);
    }

    static void lc4jAbort() throws Exception {
        CompletableFuture<StreamingHandle> cancelled = new CompletableFuture<>();
        streaming().chat(QUESTION, new StreamingChatResponseHandler() {
            public void onPartialResponse(PartialResponse part, PartialResponseContext context) {
                context.streamingHandle().cancel();
                cancelled.complete(context.streamingHandle());
            }
            public void onCompleteResponse(ChatResponse response) { cancelled.completeExceptionally(new AssertionError("it went on")); }
            public void onError(Throwable error) { cancelled.completeExceptionally(error); }
        });
        expect(cancelled.get(60, TimeUnit.SECONDS).isCancelled(), "");
        lc4jText();
    }

    static void lc4jErrors() {
        try {
            chat("no-such-model").chat(QUESTION);
        } catch (dev.langchain4j.exception.ModelNotFoundException error) {
            return;
        }
        throw new AssertionError("the model does not exist");
    }

    public static void main(String[] words) throws Exception {
        url = words[1];
        model = words[2];
        if (words[0].equals("openai")) {
            check("text", JavaClients::openaiText);
            check("stream", JavaClients::openaiStream);
            check("tool_loop", JavaClients::openaiToolLoop);
            check("abort", JavaClients::openaiAbort);
            check("retry", () -> behindAnOverloadedProxy(JavaClients::openaiText));
            check("errors", JavaClients::openaiErrors);
        } else {
            check("text", JavaClients::lc4jText);
            check("stream", JavaClients::lc4jStream);
            check("tool_loop", JavaClients::lc4jToolLoop);
            check("tool_loop_streamed", JavaClients::lc4jToolLoopStreamed);
            check("abort", JavaClients::lc4jAbort);
            check("retry", () -> behindAnOverloadedProxy(JavaClients::lc4jText));
            check("errors", JavaClients::lc4jErrors);
        }
        System.exit(0);
    }
}
