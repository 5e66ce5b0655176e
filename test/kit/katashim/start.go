package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/containerd/containerd/api/runtime/bootstrap/v1"
	task "github.com/containerd/containerd/api/runtime/task/v2"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/crius-run/crius/conmon/shim"
)

// socket returns the name of the abstract socket of a sandbox, for the answer.
func (s settings) socket(sandbox string) string {
	hash := fmt.Sprintf("%x", sha256.Sum256([]byte(s.address+"/"+sandbox)))[:40]
	if old() {
		return "/containerd-shim/" + hash + "/shim.sock"
	}
	return "fakekata/" + hash
}

// bound returns the name that the kernel has.
func bound(name string) string {
	if old() {
		name += "\x00"
	}
	return "@" + name
}

// Forms in which a shim is started and answers, which a pod may request.
const (
	inJSON      = "json"      // version 3 of the service
	inBootstrap = "bootstrap" // that of containerd 2.3: parameters on standard input, and no other; version 3
	asOlder     = "older"     // refuses parameters
	inGarbage   = "garbage"   // an answer that names no address, of a shim that lives
)

// read checks the standard input of start.
func (s settings) read(form string) error {
	input, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	var params bootstrap.BootstrapParams
	err = proto.Unmarshal(input, &params)
	switch {
	case form == inBootstrap && (err != nil || params.InstanceID != s.id || params.Namespace != shim.Namespace):
		return fmt.Errorf("standard input has no parameters for %s: %q, %w", s.id, input, err)
	case form == asOlder && len(input) > 0:
		return fmt.Errorf("standard input has options of an unknown type: %q", input)
	}
	return nil
}

// answer prints where the shim listens.
func answer(form, address string) error {
	switch form {
	case inJSON:
		fmt.Printf(`{"version":3,"address":%q,"protocol":"ttrpc"}`, address)
	case inBootstrap:
		text, err := proto.Marshal(&bootstrap.BootstrapResult{Version: 3, Address: address, Protocol: "ttrpc"})
		if err != nil {
			return err
		}
		_, err = os.Stdout.Write(text)
		return err
	case inGarbage:
		fmt.Print("starting\nready\n")
	default:
		fmt.Print(address)
	}
	return nil
}

// start makes a shim for the pod's own container, and finds it for the others.
func start(s settings) error {
	b, err := readBundle(".")
	if err != nil {
		return err
	}
	sandbox, itself, err := b.sandbox()
	if err != nil {
		return err
	}
	form := b.spec.Annotations[answerAnnotation]
	if wasm() {
		form = asOlder
	}
	if err := s.read(form); err != nil {
		return err
	}
	name := s.socket(sandbox)
	if itself {
		err = launch(s, name)
	} else if conn, failed := net.Dial("unix", bound(name)); failed != nil {
		err = fmt.Errorf("%w: %w", errNoSandbox, failed)
	} else {
		err = conn.Close()
	}
	if err != nil {
		return err
	}
	return answer(form, name)
}

// launch starts a daemon that listens.
func launch(s settings, name string) error {
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: bound(name), Net: "unix"})
	if err != nil {
		return err
	}
	socket, err := listener.File()
	if err != nil {
		return err
	}
	log, err := os.OpenFile(shim.LogFile, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	daemon := exec.Command(self, "-id", s.id, "-address", s.address, "serve")
	daemon.Args[0] = os.Args[0]
	daemon.ExtraFiles, daemon.Stderr = []*os.File{socket}, log
	daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return daemon.Start()
}

// remove cleans up after a dead shim: everything that works in this directory
// belongs to the machine, and is killed.
func remove(s settings) error {
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	b, err := readBundle(dir)
	if err != nil {
		return err
	}
	_, itself, err := b.sandbox()
	if err != nil {
		return err
	}
	_, _ = inner(s.id, dir, dir).Delete(background()) // there may be nothing to delete
	if itself {
		for _, worker := range shim.Workers(dir) {
			if worker.PID != os.Getpid() {
				_ = unix.Kill(worker.PID, unix.SIGKILL)
			}
		}
		endMachine(dir)
		removeLink(b)
		if address, err := os.ReadFile("address"); err == nil {
			_ = shim.Endpoint{Address: string(address)}.RemoveSocket(background())
		}
	}
	answer, err := proto.Marshal(&task.DeleteResponse{ExitStatus: 137})
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(answer)
	return err
}

// inner returns runc's shim, which makes the containers in place of a guest's
// agent.
func inner(id, dir, machine string) shim.Program {
	options, err := shim.Options(true, []string{"Root=" + filepath.Join(machine, "vm")})
	if err != nil {
		panic(err)
	}
	return shim.Program{Path: "containerd-shim-runc-v2", ID: id, Dir: dir, Server: machine, Publisher: "/bin/true", Options: options}
}

// link is the interface that Kata adds to the pod's network namespace.
const link = "tap0_kata"

func addLink(b *bundle) error { return ipLink(b, "add", link, "type", "bridge") }
func removeLink(b *bundle)    { _ = ipLink(b, "del", link) }

func ipLink(b *bundle, args ...string) error {
	for _, n := range b.spec.Linux.Namespaces {
		if n.Type != "network" || n.Path == "" {
			continue
		}
		argv := append([]string{"--net=" + n.Path, "ip", "link"}, args...)
		if out, err := exec.Command("nsenter", argv...).CombinedOutput(); err != nil {
			return fmt.Errorf("nsenter %v: %w: %s", argv, err, out)
		}
	}
	return nil
}
