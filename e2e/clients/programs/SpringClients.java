import java.util.List;
import org.springframework.ai.chat.client.ChatClient;
import org.springframework.ai.chat.model.ChatResponse;
import org.springframework.ai.openai.OpenAiChatModel;
import org.springframework.ai.openai.OpenAiChatOptions;
import org.springframework.ai.openai.api.OpenAiApi;
import org.springframework.ai.retry.NonTransientAiException;
import org.springframework.ai.retry.RetryUtils;
import org.springframework.ai.tool.annotation.Tool;

/** The checks of Spring AI: `java SpringClients URL MODEL`. It sends each body behind `Upgrade: h2c`. */
public class SpringClients {
    static class Weather {
        @Tool(description = "The weather.")
        public int get_weather(String city) {
            JavaClients.CITIES.add(city);
            return 21;
        }
    }

    static ChatClient.ChatClientRequestSpec ask(String name) {
        OpenAiApi api = OpenAiApi.builder().baseUrl(JavaClients.url.replaceAll("/v1$", "")).apiKey("none").build();
        OpenAiChatOptions options = OpenAiChatOptions.builder().model(name).maxTokens(200).streamUsage(true).build();
        OpenAiChatModel model = OpenAiChatModel.builder().openAiApi(api).defaultOptions(options)
            .retryTemplate(RetryUtils.SHORT_RETRY_TEMPLATE).build();
        return ChatClient.create(model).prompt().user(JavaClients.QUESTION);
    }

    static ChatClient.ChatClientRequestSpec ask() {
        return ask(JavaClients.model);
    }

    static void text() {
        JavaClients.expect("Yes.".equals(ask().call().content()), "");
    }

    static void stream() {
        List<ChatResponse> chunks = ask().stream().chatResponse().collectList().block();
        StringBuilder text = new StringBuilder();
        for (ChatResponse chunk : chunks) {
            String piece = chunk.getResult() == null ? null : chunk.getResult().getOutput().getText();
            text.append(piece == null ? "" : piece);
        }
        JavaClients.expect(text.toString().equals("Yes."), chunks);
        JavaClients.expect(chunks.get(chunks.size() - 1).getMetadata().getUsage().getCompletionTokens() > 0, chunks);
    }

    static void toolLoop() {
        JavaClients.CITIES.clear();
        String text = ask().tools(new Weather()).call().content();
        JavaClients.expect(JavaClients.CITIES.equals(List.of("Paris")) && text.contains("21"), JavaClients.CITIES + text);
    }

    static void toolLoopStreamed() {
        JavaClients.CITIES.clear();
        String text = String.join("", ask().tools(new Weather()).stream().content().collectList().block());
        JavaClients.expect(JavaClients.CITIES.equals(List.of("Paris")) && text.contains("21"), JavaClients.CITIES + text);
    }

    static void abort() {
        ask().stream().content().blockFirst();  // cancels the stream
        text();
    }

    static void errors() {
        try {
            ask("no-such-model").call().content();
        } catch (NonTransientAiException error) {
            JavaClients.expect(error.getMessage().contains("404"), error);
            return;
        }
        throw new AssertionError("the model does not exist");
    }

    public static void main(String[] words) throws Exception {
        JavaClients.url = words[0];
        JavaClients.model = words[1];
        JavaClients.check("text", SpringClients::text);
        JavaClients.check("stream", SpringClients::stream);
        JavaClients.check("tool_loop", SpringClients::toolLoop);
        JavaClients.check("tool_loop_streamed", SpringClients::toolLoopStreamed);
        JavaClients.check("abort", SpringClients::abort);
        JavaClients.check("retry", () -> JavaClients.behindAnOverloadedProxy(SpringClients::text));
        JavaClients.check("errors", SpringClients::errors);
        System.exit(0);
    }
}
