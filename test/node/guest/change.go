package main

import (
	"context"
	"fmt"
	"os"
)

// nvidiaRan is made by the stand-in for nvidia's runtime.
const nvidiaRan = "/root/nvidia-ran"

// profiles prints crius's AppArmor profiles in the kernel.
const profiles = "grep ^crius-default /sys/kernel/security/apparmor/profiles"

// switchOver makes crius import the configuration of CRI-O on a node, with
// handlers that nvidia-ctk and kata-deploy have added, by one command and one
// restart; afterwards it restores the node's own configuration.
func (p *operator) switchOver(ctx context.Context) error {
	// Of the configured runtimes, those of CRI-O's package and of nvidia's
	// toolkit exist, and kata's do not.
	if out, err := shell(`set -e
		install -D -m 644 crio.conf /etc/crio/crio.conf
		install -D -m 644 -t /etc/crio/crio.conf.d 10-crio.conf 99-kata-deploy 99-nvidia.conf
		install -m 644 /etc/containers/policy.json /etc/crio/policy.json
		mkdir -p /usr/libexec/crio /opt/cni
		ln -s /usr/sbin/runc /usr/bin/crun /usr/libexec/crio/
		ln -s /usr/lib/cni /opt/cni/bin
		printf '#!/bin/sh\ntouch ` + nvidiaRan + `\nexec /usr/sbin/runc "$@"\n' >/usr/bin/nvidia-container-runtime
		chmod 755 /usr/bin/nvidia-container-runtime
		cp /etc/crius/crius.toml /root/crius.toml`); err != nil {
		return fmt.Errorf("the node of CRI-O: %w: %s", err, out)
	}
	const take = "crius config --from-crio > /etc/crius/crius.toml && systemctl restart crius"
	p.promise(take, atTerminal(take))
	p.promise("after the switch the node is well and the pod unharmed", p.healthy(ctx))
	p.see(ctx, "the handlers of CRI-O are there", "crius status | tr -s ' '", "crun: ", "runc: ", "nvidia (default): ")
	p.see(ctx, "handlers whose programs are missing are named with them", "crius check",
		"kata-qemu: ", "kata-clh: ", "/opt/kata/bin/containerd-shim-kata-v2", "nvidia-cdi: ", "/usr/bin/nvidia-container-runtime.cdi")
	p.see(ctx, "crius check --from-crio finds no difference that keeps pods from running", "crius check --from-crio && echo content", "content")
	_ = os.Remove(nvidiaRan)
	_, err := startPod(ctx, "switched")
	if err == nil {
		_, err = os.Stat(nvidiaRan)
	}
	p.promise("a pod starts with the default handler, which is nvidia's", err)
	if err := endPod("switched"); err != nil {
		return err
	}
	p.see(ctx, "it is gone with its manifest", "crictl pods --name switched --state Ready --quiet | wc -l", "0\n")
	// The kubelet takes a while to remove the sandbox, which needs the handler.
	if out, err := shell("crictl pods --name switched --quiet | xargs --no-run-if-empty crictl rmp --force"); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	const back = "install -m 644 /root/crius.toml /etc/crius/crius.toml && systemctl restart crius"
	p.promise("back: "+back, atTerminal(back))
	p.promise("with its own configuration again the node is well and the pod unharmed", p.healthy(ctx))
	return nil
}

// changeIdentity has crius stand for CRI-O, as docs/installers.md says, then for containerd, and
// for itself again, under the steady pod.
func (p *operator) changeIdentity(ctx context.Context) error {
	const (
		dropIn = "/etc/crius/crius.toml.d/50-identity.toml"
		unit   = "/etc/systemd/system/crio.service"
	)
	for _, as := range []struct{ name, config, restart string }{
		{
			"cri-o",
			"[api]\nruntime_name = \"cri-o\"\ncrio_socket = \"/var/run/crio/crio.sock\"\n[runtime]\ncrio_handlers_dir = \"/etc/crio/crio.conf.d\"\n",
			"ln -s /usr/lib/systemd/system/crius.service " + unit + " && systemctl daemon-reload && systemctl restart crio",
		},
		{"containerd", "[api]\nruntime_name = \"containerd\"\n", "rm " + unit + " && systemctl daemon-reload && systemctl restart crius"},
		{"crius", "", "rm " + dropIn + " && systemctl restart crius"},
	} {
		if err := write(dropIn, as.config); err != nil {
			return err
		}
		p.promise("as "+as.name+": "+as.restart, atTerminal(as.restart))
		p.see(ctx, "as "+as.name+": crictl shows the name", "crictl version | tr -s ' '", "RuntimeName: "+as.name+"\n")
		p.promise("as "+as.name+": the node is well and the pod unharmed", p.healthy(ctx))
		if as.name == "cri-o" {
			p.see(ctx, "drop-ins of nvidia-ctk and kata-deploy are taken", "crius status; crius check", "nvidia", "kata-qemu")
			p.see(ctx, "tools find it at CRI-O's socket", "crictl --runtime-endpoint unix:///var/run/crio/crio.sock pods --quiet --name steady | wc -l", "1\n")
		}
	}
	return nil
}

// downAndUp downgrades the package to the previous version and upgrades it
// again, and removes and reinstalls it, under the steady pod.
func (p *operator) downAndUp(ctx context.Context) error {
	current, err := shell("crius version")
	if err != nil {
		return fmt.Errorf("crius version: %w: %s", err, current)
	}
	for _, way := range []struct{ name, deb string }{{"down", "./previous.deb"}, {"up", "./bin/packages/crius_0_amd64.deb"}} {
		script := "apt-get install --yes --allow-downgrades " + way.deb + " && systemctl restart crius"
		p.promise(way.name+": "+script, atTerminal(script))
		version, _ := shell("crius version")
		if way.name == "down" {
			p.promise("down: the version is another one", different(version, current))
		} else {
			p.promise("up: the version is the current one", same(version, current))
		}
		p.promise(way.name+": the node is well and the pod unharmed", p.healthy(ctx))
	}
	const confined = "cat /proc/$(pgrep -f '[s]teady forever')/attr/current"
	const alive = "pgrep -f '[s]teady forever' >/dev/null && echo alive"
	p.promise("apt-get remove crius", atTerminal("apt-get remove crius"))
	p.see(ctx, "the server is gone with the package", "test ! -e /usr/bin/crius && ! pgrep -x crius && echo gone", "gone")
	p.see(ctx, "the container runs on without it", alive, "alive")
	p.see(ctx, "and confined: its AppArmor profile is still loaded", confined+"; "+profiles, "crius-default (enforce)\ncrius-default (enforce)")
	const back = "apt-get install ./bin/packages/crius_0_amd64.deb && systemctl enable --now crius"
	p.promise(back, atTerminal(back))
	p.promise("the package is back: the node is well and the pod unharmed", p.healthy(ctx))
	return nil
}

// remove follows the page for the removal.
func (p *operator) remove(ctx context.Context) error {
	p.follow("Remove", p.page["Remove"][0])
	p.see(ctx, "nothing of the pods runs any more", "pgrep -f '[s]teady forever' || echo gone", "gone")
	p.see(ctx, "the AppArmor profile is unloaded", profiles+" || echo gone", "gone")
	// Not mentioned on the page: the network and its addresses.
	if out, err := shell("rm -r /etc/cni/net.d/10-crius-bridge.conflist /var/lib/cni/networks/crius-bridge"); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}
