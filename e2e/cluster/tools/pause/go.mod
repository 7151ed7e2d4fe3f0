module conveyor/tools/pause

go 1.26.0
