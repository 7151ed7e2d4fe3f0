// Prints what kstatus computes for each object of a JSON list on stdin: a line for each, status and message.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

func main() {
	var objects []json.RawMessage
	if err := json.NewDecoder(os.Stdin).Decode(&objects); err != nil {
		panic(err)
	}
	for _, object := range objects {
		parsed := &unstructured.Unstructured{}
		if err := parsed.UnmarshalJSON(object); err != nil {
			panic(err)
		}
		result, err := status.Compute(parsed)
		if err != nil {
			panic(err)
		}
		fmt.Printf("%s\t%q\n", result.Status, result.Message)
	}
}
