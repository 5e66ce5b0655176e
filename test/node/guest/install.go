package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/crius-run/crius/test/kit/critest"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

// operator is a person who makes a node from a bare machine with only
// docs/install.md, and maintains it.
type operator struct {
	page   page
	steady containerStatus // of a pod that nothing but its removal may affect
	report
}

// install does what an operator does, from the installation to the removal, and
// reports each step. It stops at a part that cannot be finished, because later
// results would mean nothing.
func install(ctx context.Context, o options, images *registry.Registry) error {
	end, err := surroundings(images)
	if err != nil {
		return err
	}
	defer end()
	before, err := onNode(o)
	if err != nil {
		return err
	}
	text, err := os.ReadFile("install.md")
	if err != nil {
		return err
	}
	p := &operator{page: parse(string(text)), report: report{mode: o.Mode}}
	for _, part := range []struct {
		name string
		run  func(context.Context) error
	}{
		{"installation", p.install}, {"kubelet", p.runKubelet}, {"network", p.addNetwork}, {"faults", p.meetFaults},
		{"CRI-O", p.switchOver}, {"identity", p.changeIdentity}, {"down and up", p.downAndUp}, {"removal", p.remove},
	} {
		if err := part.run(ctx); err != nil {
			p.promise(part.name+" cannot be finished", err)
			break
		}
	}
	after, err := onNode(o)
	if err != nil {
		return err
	}
	return errors.Join(p.write(), os.WriteFile("out/left", []byte(strings.Join(inventory.Beyond(before, after), "\n")), 0o644))
}

// surroundings provides the environment of a node, until end is called: an
// internet, which is a registry under the names of the public ones, and an
// address.
func surroundings(images *registry.Registry) (end func(), err error) {
	end, err = untrusted()
	if err != nil {
		return nil, err
	}
	return end, errors.Join(pushLarge(images),
		// The answer is yes: apt discards what is typed before it asks.
		write("/etc/apt/apt.conf.d/90-yes", "APT::Get::Assume-Yes \"true\";\n"),
		write("/etc/containers/registries.conf.d/50-internet.conf", critest.Registries(address)),
		command("ip", "link", "set", "lo", "up"), command("ip", "address", "add", nodeAddress+"/32", "dev", "lo"))
}

// onNode returns everything of crius on a node.
func onNode(o options) ([]string, error) {
	lines, err := take(o)
	if err != nil {
		return nil, err
	}
	files, _ := shell(`find /etc /usr /opt /run /var/lib -xdev -iname '*crius*' -printf 'file: %p\n' 2>/dev/null`) // files that vanish meanwhile cause an error
	return append(lines, strings.Split(strings.TrimSpace(files), "\n")...), nil
}

// follow runs the commands below a heading of the page, and reports each.
func (p *operator) follow(heading string, commands []string) {
	for _, command := range commands {
		if strings.HasPrefix(command, "make ") { // the host has done that
			continue
		}
		first, _, _ := strings.Cut(command, "\n")
		p.promise(fmt.Sprintf("install.md, %s: %s", heading, first), atTerminal(command))
	}
}

// see reports whether the output of a command eventually contains everything
// wanted.
func (p *operator) see(ctx context.Context, about, script string, wants ...string) {
	p.promise(about, shows(ctx, script, wants...))
}

// install follows the page until the server is running.
func (p *operator) install(ctx context.Context) error {
	// The file is where the page expects it after make packages.
	if err := errors.Join(os.MkdirAll("bin/packages", 0o755), os.Rename("crius.deb", "bin/packages/crius_0_amd64.deb"),
		command("install", "-m", "755", "crictl", "/usr/local/bin/crictl")); err != nil {
		return err
	}
	p.follow("Packages", p.page["Packages"][0])
	p.follow("Packages", p.page["Packages"][1])
	p.see(ctx, "installing starts nothing", "systemctl is-active crius || true", "inactive")
	p.follow("Start", p.page["Start"][0])
	p.see(ctx, "the service has started and is enabled", "systemctl is-active crius; systemctl is-enabled crius", "active\nenabled")
	p.see(ctx, "its AppArmor profile is loaded", profiles, "crius-default (enforce)")
	p.see(ctx, "crius check says, as the page has it, that there is no network yet", "crius check", "no CNI network configuration in /etc/cni/net.d")
	p.see(ctx, "the node is ready but for the network", "crius status | tr -s ' '", "RuntimeReady yes", "NetworkReady NO: no CNI network configuration")
	return nil
}

// addNetwork does what a network add-on does, and runs the first pod in that
// network.
func (p *operator) addNetwork(ctx context.Context) error {
	if err := command("install", "-D", "-t", "/etc/cni/net.d", "-m", "644", examples+"/cni/10-crius-bridge.conflist"); err != nil {
		return err
	}
	p.see(ctx, "the node has a network", "crius status | tr -s ' '", "RuntimeReady yes", "NetworkReady yes")
	status, err := startPod(ctx, "steady")
	if err != nil {
		return err
	}
	p.steady = status.ContainerStatuses[0]
	if !strings.HasPrefix(status.PodIP, "10.85.") {
		err = fmt.Errorf("its address is %q", status.PodIP)
	}
	p.promise("a pod on the network is ready, and has an address of it", err)
	return nil
}

// unharmed checks that the steady pod is ready, with the container that it has
// always had.
func (p *operator) unharmed(ctx context.Context) error {
	status, err := awaitPod(ctx, "steady")
	if err != nil {
		return err
	}
	now := status.ContainerStatuses[0]
	return same(fmt.Sprint(now.ContainerID, " restarted ", now.RestartCount), fmt.Sprint(p.steady.ContainerID, " restarted 0"))
}

// healthy checks that the node is as it is without any fault.
func (p *operator) healthy(ctx context.Context) error {
	return errors.Join(shows(ctx, "crius check && echo content", "CNI is ready", "content"), p.unharmed(ctx))
}

// shell returns a script's output.
func shell(script string) (string, error) {
	out, err := exec.Command("sh", "-c", script).CombinedOutput()
	return string(out), err
}

// atTerminal runs a command at a terminal, and answers yes to its questions.
func atTerminal(command string) error {
	cmd := exec.Command("script", "--quiet", "--return", "--command", command, "/dev/null")
	cmd.Stdin = strings.NewReader("yes\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.ReplaceAll(string(out), "\r", ""))
	}
	return nil
}

// patience is how long the output of a script may take to contain what is
// wanted. Only a failure takes that long.
const patience = 2 * time.Minute

// shows checks that the output of a script eventually contains everything
// wanted, whatever its exit code: a check that finds something fails.
func shows(ctx context.Context, script string, wants ...string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var out string
	if !wait.Until(ctx, func() bool {
		out, _ = shell(script)
		return !slices.ContainsFunc(wants, func(want string) bool { return !strings.Contains(out, want) })
	}) {
		return fmt.Errorf("%s: does not say %q, but:\n%s", script, wants, out)
	}
	return nil
}
