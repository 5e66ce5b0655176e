package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/server"
)

// version is set by the linker: -X main.version=v1.2.3.
var version string

// versionInfo is the document of `crius version`.
type versionInfo struct {
	Crius   string            `json:"crius"`
	Commit  string            `json:"commit,omitempty"`
	Go      string            `json:"go"`
	CRI     []string          `json:"cri"`
	Modules map[string]string `json:"modules,omitempty"`
}

// currentVersion returns the version set by the linker, else that of the module.
func currentVersion() versionInfo {
	info := versionInfo{
		Crius:   version,
		Go:      fmt.Sprintf("%s %s/%s", runtime.Version(), runtime.GOOS, runtime.GOARCH),
		CRI:     []string{"v1", "v1alpha2"},
		Modules: map[string]string{},
	}
	build, ok := debug.ReadBuildInfo()
	if ok && info.Crius == "" {
		info.Crius = build.Main.Version
	}
	info.Crius = server.Semver(info.Crius) // as the server reports it to the kubelet
	if !ok {
		return info
	}
	for _, s := range build.Settings {
		switch {
		case s.Key == "vcs.revision":
			info.Commit = s.Value + info.Commit
		case s.Key == "vcs.modified" && s.Value == "true":
			info.Commit += " (modified)"
		}
	}
	for _, m := range build.Deps {
		if slices.Contains(tellingModules, m.Path) {
			info.Modules[m.Path] = m.Version
		}
	}
	return info
}

// tellingModules are modules whose versions explain behaviour that users see.
var tellingModules = []string{
	"k8s.io/cri-api",
	"google.golang.org/grpc",
	"go.podman.io/image/v5",
	"go.podman.io/storage",
	"github.com/containernetworking/cni",
	"github.com/opencontainers/runtime-spec",
}

func versionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the versions of crius and of the libraries it is built with",
		Args:  cli.Operands,
	}
	format := cli.FormatFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		info := currentVersion()
		return format.Print(cmd.OutOrStdout(), info, info.text)
	}
	return cmd
}

// printVersion prints the version for people.
func printVersion(w io.Writer) error {
	return cli.Format("text").Print(w, nil, currentVersion().text)
}

func (v versionInfo) text(w io.Writer) {
	row := func(name, value string) {
		if value != "" {
			fmt.Fprintf(w, "%-39s%s\n", name, value)
		}
	}
	row("crius", v.Crius)
	row("commit", v.Commit)
	row("go", v.Go)
	row("CRI", strings.Join(v.CRI, ", "))
	for _, module := range tellingModules {
		row(module, v.Modules[module])
	}
}
