//go:build tools

// Package etcd pins the etcd of the cluster that Kubernetes' own tests run in.
package etcd

import _ "go.etcd.io/etcd/server/v3"
