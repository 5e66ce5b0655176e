// Command distribution is CNCF Distribution's registry without the storages and ways to log in that no
// test uses, which need the libraries of three clouds. It is a separate module, so that its
// dependencies never become crius's; package test/kit/tools builds it.
package main

import (
	"os"

	"github.com/distribution/distribution/v3/registry"
	_ "github.com/distribution/distribution/v3/registry/auth/htpasswd"
	_ "github.com/distribution/distribution/v3/registry/auth/token"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
)

func main() {
	if registry.RootCmd.Execute() != nil { // and has said why
		os.Exit(1)
	}
}
