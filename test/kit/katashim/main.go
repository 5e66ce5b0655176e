// Command katashim is a shim for tests that behaves like Kata's, without a
// virtual machine: one shim for all containers of a pod, the pod's own first;
// its own pid for every task; an abstract socket whose name is its whole
// answer; a slow boot; its own link in the pod's network namespace; a file in
// the bundle of a container that ran out of memory; output that ends with the
// input, see streams. It lets runc's shim make the containers. Annotations of the pod make it misbehave, see the end of this
// file.
//
// Called containerd-shim-fakekata1-v2 it has what Kata 1 has in addition: no
// flag -v; an abstract socket that looks like a path, with a NUL at its end; a
// machine, which is a process of its own and ends only after the sandbox. Such
// a shim deletes a sandbox that runs without complaint and loses its machine;
// it reports exit code 0 for what ended with its machine, and a request's
// deadline ends the input of the command that it starts.
//
// Called containerd-shim-fakewasm-v1 it is a shim for WebAssembly like those in
// Rust that are built on runwasi: it makes, starts, kills and deletes
// containers, and says of all else that it is not supported, see refused. It
// reads its options alone from standard input, and knows nothing of a network.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// version names a shim that cannot be mistaken for runc's.
const version = "containerd-shim-fakekata-v2:\n  Version:  1.0\n"

// settings are the flags of every shim.
type settings struct{ id, address, bundle string }

// old reports whether this is the shim of Kata 1.
func old() bool { return strings.Contains(filepath.Base(os.Args[0]), "kata1") }

// wasm reports whether this is a shim for WebAssembly.
func wasm() bool { return strings.Contains(filepath.Base(os.Args[0]), "wasm") }

func main() {
	var s settings
	show := new(bool)
	if !old() {
		flag.BoolVar(show, "v", false, "")
	}
	flag.StringVar(&s.id, "id", "", "")
	flag.StringVar(&s.address, "address", "", "")
	flag.StringVar(&s.bundle, "bundle", "", "")
	for _, known := range []string{"namespace", "publish-binary"} {
		flag.String(known, "", "")
	}
	flag.Parse()
	if *show {
		fmt.Print(version)
		return
	}
	var err error
	switch flag.Arg(0) {
	case "start":
		err = start(s)
	case "serve":
		err = serve(s)
	case "machine":
		for {
			time.Sleep(time.Hour) // until it is killed
		}
	case "delete":
		err = remove(s)
	default:
		err = fmt.Errorf("unknown verb %q", flag.Arg(0))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "katashim:", err)
		os.Exit(1)
	}
}

// bundle is what a shim needs to know about a container before it makes it.
type bundle struct{ spec specs.Spec }

func readBundle(dir string) (*bundle, error) {
	text, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return nil, err
	}
	b := new(bundle)
	return b, json.Unmarshal(text, &b.spec)
}

// sandbox returns the id of the pod's own container. Both families of
// annotations must agree.
func (b *bundle) sandbox() (id string, itself bool, err error) {
	a := b.spec.Annotations
	id, kind := a["io.kubernetes.cri.sandbox-id"], a["io.kubernetes.cri.container-type"]
	if id == "" || id != a["io.kubernetes.cri-o.SandboxID"] || kind != a["io.kubernetes.cri-o.ContainerType"] {
		return "", false, fmt.Errorf("annotations disagree about the sandbox: %v", a)
	}
	return id, kind == "sandbox", nil
}

// What a pod may request, by annotations that the handler must allow.
const (
	bootAnnotation   = "io.katacontainers.config.hypervisor.boot_time" // a duration
	deathAnnotation  = "io.katacontainers.config.hypervisor.dies_at"   // a method of the task service, of a container that is not the sandbox; "METHOD of sandbox": of that
	answerAnnotation = "io.katacontainers.config.hypervisor.answer"    // see the constants of start.go
	hangsAnnotation  = "io.katacontainers.config.hypervisor.hangs"     // kill: acknowledges SIGKILL for a container that is not the sandbox, and does nothing; end: it stops listening, and lives on; deaf: it stops listening once such a container runs
)

// die ends the shim if the pod requests that at this point.
func (b *bundle) die(at string) {
	method, of, _ := strings.Cut(b.spec.Annotations[deathAnnotation], " of ")
	if method == at && cmp.Or(of, "container") == b.spec.Annotations["io.kubernetes.cri.container-type"] {
		fmt.Fprintln(os.Stderr, "dies at", at)
		os.Exit(3)
	}
}

func (b *bundle) bootTime() time.Duration {
	d, _ := time.ParseDuration(b.spec.Annotations[bootAnnotation])
	return d
}

var errNoSandbox = errors.New("the sandbox does not run: containers come after it")

func background() context.Context { return context.Background() }
