//go:build tools

// Package etcd pins the etcd of the cluster in which Kubernetes' own tests run.
package etcd

import _ "go.etcd.io/etcd/server/v3"
