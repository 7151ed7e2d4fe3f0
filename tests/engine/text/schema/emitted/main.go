// The JSON schema of each of Go's types by invopop/jsonschema: go run . > go.json
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"time"

	"github.com/invopop/jsonschema"
)

type Inner struct {
	City string `json:"city" jsonschema:"minLength=1,maxLength=20"`
}

type Node struct {
	Value int     `json:"value"`
	Next  *Node   `json:"next,omitempty"`
	Nodes []*Node `json:"nodes,omitempty"`
}

func main() {
	types := map[string]any{
		"string": struct{ A string }{}, "bool": struct{ A bool }{}, "int": struct{ A int }{}, "int64": struct{ A int64 }{}, "uint8": struct{ A uint8 }{},
		"float64": struct{ A float64 }{}, "*string": struct{ A *string }{}, "omitempty": struct {
			A string `json:"a,omitempty"`
		}{},
		"[]string": struct{ A []string }{}, "[3]int": struct{ A [3]int }{}, "[]byte": struct{ A []byte }{}, "map[string]int": struct{ A map[string]int }{},
		"map[int]string": struct{ A map[int]string }{}, "any": struct{ A any }{}, "json.RawMessage": struct{ A json.RawMessage }{},
		"time.Time": struct{ A time.Time }{}, "time.Duration": struct{ A time.Duration }{}, "url.URL": struct{ A url.URL }{}, "net.IP": struct{ A net.IP }{},
		"struct": struct{ A Inner }{}, "[]struct": struct{ A []Inner }{}, "embedded": struct{ Inner }{}, "recursive": Node{},
		"enum": struct {
			A string `json:"a" jsonschema:"enum=x,enum=y"`
		}{},
		"bounds": struct {
			A float64 `json:"a" jsonschema:"minimum=0,exclusiveMaximum=1"`
			B int     `json:"b" jsonschema:"multipleOf=5,maximum=100"`
		}{},
		"pattern": struct {
			A string `json:"a" jsonschema:"pattern=^[a-c]+$"`
		}{},
		"format": struct {
			A string `json:"a" jsonschema:"format=email"`
		}{},
		"uniqueItems": struct {
			A []string `json:"a" jsonschema:"uniqueItems=true,minItems=1"`
		}{},
		"oneof_required": struct {
			A string `json:"a,omitempty" jsonschema:"oneof_required=first"`
			B string `json:"b,omitempty" jsonschema:"oneof_required=second"`
		}{},
		"anyof_required": struct {
			A string `json:"a,omitempty" jsonschema:"anyof_required=first"`
			B string `json:"b,omitempty" jsonschema:"anyof_required=second"`
		}{},
		"oneof_type": struct {
			A any `json:"a" jsonschema:"oneof_type=string;array"`
		}{},
	}
	emitted := map[string]*jsonschema.Schema{}
	for name, value := range types {
		emitted[name] = jsonschema.Reflect(value)
	}
	text, err := json.MarshalIndent(emitted, "", " ")
	if err != nil {
		panic(err)
	}
	fmt.Println(string(text))
}
