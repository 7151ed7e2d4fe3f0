// Clients for Go: go_clients openai|anthropic|langchaingo URL MODEL
// The model of e2e/demo_model/script.py calls get_weather once, and answers with JSON behind it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	neturl "net/url"
	"os"
	"strings"

	"github.com/anthropics/anthropic-sdk-go"
	anthropicoption "github.com/anthropics/anthropic-sdk-go/option"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/tmc/langchaingo/llms"
	langchain "github.com/tmc/langchaingo/llms/openai"
)

const question = "How is the weather in Paris?"

var (
	ctx        = context.Background()
	url, model string
	properties = map[string]any{"city": map[string]any{"type": "string"}}
)

type check struct {
	name string
	run  func()
}

func must(holds bool, words ...any) {
	if !holds {
		panic(fmt.Sprint(words...))
	}
}

func ok[T any](value T, err error) T {
	must(err == nil, err)
	return value
}

func mustBeForecast(text string) {
	var found struct {
		City    string
		Degrees int
	}
	must(json.Unmarshal([]byte(text), &found) == nil && found.City == "Paris" && found.Degrees == 21, text)
}

// overloadedAtFirst calls use with a URL whose first request gets 503. Another request must follow.
func overloadedAtFirst(use func(url string)) {
	origin := ok(neturl.Parse(url))
	pass := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(&neturl.URL{Scheme: "http", Host: origin.Host}) }}
	number := 0
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if number++; number == 1 {
			w.WriteHeader(503)
			return
		}
		pass.ServeHTTP(w, r)
	}))
	defer proxy.Close()
	use(proxy.URL + origin.Path)
	must(number == 2, number, " requests were sent")
}

func openaiChecks() []check {
	client := openai.NewClient(option.WithBaseURL(url), option.WithAPIKey("none"), option.WithMaxRetries(0))
	asked := openai.ChatCompletionNewParams{
		Model: model, MaxTokens: openai.Int(200), Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(question)},
	}
	withTools := asked
	withTools.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{
		Name: "get_weather", Parameters: map[string]any{"type": "object", "properties": properties},
	})}
	stream := func(params openai.ChatCompletionNewParams) openai.ChatCompletion {
		params.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
		events, whole := client.Chat.Completions.NewStreaming(ctx, params), openai.ChatCompletionAccumulator{}
		for events.Next() {
			must(whole.AddChunk(events.Current()), "a chunk does not fit")
		}
		must(events.Err() == nil, events.Err())
		return whole.ChatCompletion
	}
	create := func(params openai.ChatCompletionNewParams) openai.ChatCompletion {
		return *ok(client.Chat.Completions.New(ctx, params))
	}
	text := func(answer openai.ChatCompletion) {
		must(answer.Choices[0].Message.Content == "Yes.", answer.RawJSON())
		must(answer.Usage.CompletionTokens > 0, "no usage")
	}
	loop := func(ask func(openai.ChatCompletionNewParams) openai.ChatCompletion) {
		message := ask(withTools).Choices[0].Message
		must(len(message.ToolCalls) == 1 && message.ToolCalls[0].Function.Name == "get_weather", message.RawJSON())
		longer := withTools
		longer.Messages = append(longer.Messages, message.ToParam(), openai.ToolMessage(`{"degrees": 21}`, message.ToolCalls[0].ID))
		mustBeForecast(ask(longer).Choices[0].Message.Content)
	}
	return []check{
		{"text", func() { text(create(asked)) }},
		{"stream_with_usage", func() { text(stream(asked)) }},
		{"tool_loop", func() { loop(create) }},
		{"streamed_tool_loop", func() { loop(stream) }},
		{"abort", func() {
			ended, cancel := context.WithCancel(ctx)
			events := client.Chat.Completions.NewStreaming(ended, asked)
			must(events.Next(), events.Err())
			cancel()
			for events.Next() {
			}
			text(create(asked))
		}},
		{"retry", func() {
			overloadedAtFirst(func(proxied string) {
				retrying := openai.NewClient(option.WithBaseURL(proxied), option.WithAPIKey("none"), option.WithMaxRetries(1))
				text(*ok(retrying.Chat.Completions.New(ctx, asked)))
			})
		}},
		{"errors", func() {
			wrong := asked
			wrong.Model = "no-such-model"
			_, err := client.Chat.Completions.New(ctx, wrong)
			var refused *openai.Error
			must(errors.As(err, &refused) && refused.StatusCode == 404, err)
		}},
	}
}

func anthropicChecks() []check {
	build := func(url string, retries int) anthropic.Client {
		base := strings.TrimSuffix(url, "/v1")
		return anthropic.NewClient(
			anthropicoption.WithBaseURL(base), anthropicoption.WithAPIKey("none"), anthropicoption.WithMaxRetries(retries),
		)
	}
	client := build(url, 0)
	asked := anthropic.MessageNewParams{
		Model: anthropic.Model(model), MaxTokens: 200,
		Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(question))},
	}
	withTools := asked
	withTools.Tools = []anthropic.ToolUnionParam{
		anthropic.ToolUnionParamOfTool(anthropic.ToolInputSchemaParam{Properties: properties}, "get_weather"),
	}
	create := func(params anthropic.MessageNewParams) anthropic.Message {
		return *ok(client.Messages.New(ctx, params))
	}
	stream := func(params anthropic.MessageNewParams) anthropic.Message {
		events, whole := client.Messages.NewStreaming(ctx, params), anthropic.Message{}
		for events.Next() {
			must(whole.Accumulate(events.Current()) == nil, "an event does not fit")
		}
		must(events.Err() == nil, events.Err())
		return whole
	}
	text := func(answer anthropic.Message) {
		must(answer.Content[0].Text == "Yes." && answer.Usage.OutputTokens > 0, answer.RawJSON())
	}
	loop := func(ask func(anthropic.MessageNewParams) anthropic.Message) {
		first := ask(withTools)
		call := first.Content[len(first.Content)-1]
		must(call.Name == "get_weather" && strings.Contains(string(call.Input), "Paris"), string(call.Input))
		longer := withTools
		result := anthropic.NewUserMessage(anthropic.NewToolResultBlock(call.ID, `{"degrees": 21}`, false))
		longer.Messages = append(longer.Messages, first.ToParam(), result)
		mustBeForecast(ask(longer).Content[0].Text)
	}
	return []check{
		{"text", func() { text(create(asked)) }},
		{"stream_with_usage", func() { text(stream(asked)) }},
		{"tool_loop", func() { loop(create) }},
		{"streamed_tool_loop", func() { loop(stream) }},
		{"abort", func() {
			ended, cancel := context.WithCancel(ctx)
			events := client.Messages.NewStreaming(ended, asked)
			must(events.Next(), events.Err())
			cancel()
			for events.Next() {
			}
			text(create(asked))
		}},
		{"retry", func() {
			overloadedAtFirst(func(proxied string) {
				retrying := build(proxied, 1)
				text(*ok(retrying.Messages.New(ctx, asked)))
			})
		}},
		{"errors", func() {
			wrong := asked
			wrong.Model = "no-such-model"
			_, err := client.Messages.New(ctx, wrong)
			var refused *anthropic.Error
			must(errors.As(err, &refused) && refused.StatusCode == 404, err)
		}},
	}
}

func langchainChecks() []check {
	build := func(name string) *langchain.LLM {
		return ok(langchain.New(langchain.WithBaseURL(url), langchain.WithToken("none"), langchain.WithModel(name)))
	}
	asked := []llms.MessageContent{llms.TextParts(llms.ChatMessageTypeHuman, question)}
	tools := llms.WithTools([]llms.Tool{{Type: "function", Function: &llms.FunctionDefinition{
		Name: "get_weather", Parameters: map[string]any{"type": "object", "properties": properties},
	}}})
	ask := func(messages []llms.MessageContent, options ...llms.CallOption) *llms.ContentChoice {
		return ok(build(model).GenerateContent(ctx, messages, append(options, llms.WithMaxTokens(200))...)).Choices[0]
	}
	return []check{
		{"text", func() { must(ask(asked).Content == "Yes.") }},
		{"stream", func() {
			var text string
			read := func(_ context.Context, piece []byte) error { text += string(piece); return nil }
			must(ask(asked, llms.WithStreamingFunc(read)).Content == "Yes." && text == "Yes.", text)
		}},
		{"tool_loop", func() {
			calls := ask(asked, tools).ToolCalls
			must(len(calls) == 1 && calls[0].FunctionCall.Name == "get_weather", calls)
			call := llms.MessageContent{Role: llms.ChatMessageTypeAI, Parts: []llms.ContentPart{calls[0]}}
			result := llms.MessageContent{Role: llms.ChatMessageTypeTool, Parts: []llms.ContentPart{
				llms.ToolCallResponse{ToolCallID: calls[0].ID, Name: "get_weather", Content: `{"degrees": 21}`},
			}}
			mustBeForecast(ask(append(asked, call, result), tools).Content)
		}},
		{"abort", func() {
			leave := func(context.Context, []byte) error { return errors.New("left") }
			_, err := build(model).GenerateContent(ctx, asked, llms.WithStreamingFunc(leave))
			must(err != nil, "it read on")
			must(ask(asked).Content == "Yes.")
		}},
		{"errors", func() {
			_, err := build("no-such-model").GenerateContent(ctx, asked)
			must(err != nil && strings.Contains(err.Error(), "404"), err)
		}},
	}
}

func main() {
	kind := os.Args[1]
	url, model = os.Args[2], os.Args[3]
	all := map[string]func() []check{"openai": openaiChecks, "anthropic": anthropicChecks, "langchaingo": langchainChecks}
	for _, each := range all[kind]() {
		each.run()
		fmt.Println("passed:", each.name)
	}
}
