//go:build tools

// Package checkpointctl pins the program with which people look into checkpoints.
package checkpointctl

import _ "github.com/checkpoint-restore/checkpointctl"
