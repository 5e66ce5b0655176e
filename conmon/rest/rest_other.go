//go:build !amd64

package rest

const supported = false

func enter(*plan) {}
