module conveyor/tools/coredns

go 1.26.0

tool github.com/coredns/coredns

require github.com/coredns/coredns v1.15.0
