module conveyor/tools/kubeconform

go 1.26.0

tool github.com/yannh/kubeconform/cmd/kubeconform

require github.com/yannh/kubeconform v0.8.0
