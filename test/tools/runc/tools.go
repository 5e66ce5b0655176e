//go:build tools

// Package tools pins the version of a current runc with which crius is tested, and those of its dependencies. It is a
// separate module, because nothing else needs them; package test/kit/tools builds it.
package tools

import _ "github.com/opencontainers/runc"
