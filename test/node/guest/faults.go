package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"

	kit "github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
)

const (
	dropIn     = "/etc/crius/crius.toml.d/90-fault.toml"
	unknownCA  = "127.0.0.1:5443"          // a registry with an unknown certificate
	largeImage = "registry.k8s.io/large:1" // larger than the free space on the full disk
)

// faults are typical faults of nodes. One shell script injects each, and
// another one heals it; what an operator looks at must show the cause and the
// fix.
var faults = []struct {
	name   string
	inject string
	look   string // a script; $since is the time before the fault
	says   []string
	heal   string
}{
	{
		"no CNI configuration", "mv /etc/cni/net.d/10-crius-bridge.conflist /root",
		"crius check", []string{"no CNI network configuration in /etc/cni/net.d", "install a network add-on"},
		"mv /root/10-crius-bridge.conflist /etc/cni/net.d",
	},
	{
		"CNI plugin missing", "mv /usr/lib/cni/bridge /root",
		"crius check", []string{`CNI plugin "bridge" is not installed`, "install it in one of them or correct network.plugin_dirs"},
		"mv /root/bridge /usr/lib/cni",
	},
	{
		"unknown key in a drop-in", "echo 'lisen = 1' >" + dropIn + "; systemctl restart crius",
		"crius check; journalctl -u crius --since @$since", []string{"crius: " + dropIn + ":1: lisen: unknown key; did you mean api.listen?"},
		"rm " + dropIn + "; systemctl restart crius",
	},
	{
		"runtime missing", "mv /usr/sbin/runc /root",
		"crius status; crius check", []string{"RuntimeReady", `no "runc" in PATH`, "install it or give its path in runtime.handlers"},
		"mv /root/runc /usr/sbin",
	},
	{
		"socket in use by another program",
		"systemctl stop crius; systemd-run --quiet --unit=other perl -MIO::Socket::UNIX -e 'IO::Socket::UNIX->new(Local => \"" + socket + "\", Listen => 128) and sleep' && sleep 1; systemctl start --no-block crius",
		"crius check; journalctl -u crius --since @$since", []string{"another process serves " + socket, "(perl)", "stop it or set a different api.listen"},
		"systemctl stop other; systemctl restart crius",
	},
	{
		"other cgroup driver than the kubelet", "printf '[runtime]\\ncgroup_driver = \"cgroupfs\"\\n' >" + dropIn + "; systemctl restart crius",
		"crius check", []string{"the kubelet's cgroup driver is systemd (/var/lib/kubelet/config.yaml)", `set runtime.cgroup_driver = "systemd"`},
		"rm " + dropIn + "; systemctl restart crius",
	},
	{
		"registry away", "crictl pull 127.0.0.1:1/app:1",
		"journalctl -u crius --since @$since", []string{"connection refused", "check that the node reaches the registry"},
		"",
	},
	{
		"registry with an unknown certificate", "crictl pull " + unknownCA + "/app:1",
		"journalctl -u crius --since @$since", []string{"certificate signed by unknown authority", "write its certificate to /etc/containers/certs.d/"},
		"",
	},
	{
		"disk full", "fallocate -l $(($(stat -f -c '%f * %S' /) - (4 << 20))) /filler; crictl pull " + largeImage,
		"crius check; journalctl -u crius --since @$since", []string{"free disk space", "no space left on device", "free space in the image store"},
		"rm /filler",
	},
	{
		"/var/lib/crius read-only", "mount --bind /var/lib/crius /var/lib/crius && mount -o remount,bind,ro /var/lib/crius",
		"crius check", []string{"root: /var/lib/crius is not writable: read-only file system", "remount it read-write"},
		"umount /var/lib/crius",
	},
	{
		"/run/crius closed to user namespaces", "chmod 700 /run/crius",
		"crius check", []string{"run_root: /run/crius has mode 0700", "chmod 711 /run/crius"},
		"chmod 711 /run/crius",
	},
	{
		"storage.conf broken", "cp /etc/containers/storage.conf /root 2>/dev/null; echo 'driver =' >/etc/containers/storage.conf; systemctl restart crius",
		"crius check", []string{"image.root:", "correct storage.conf or set image.root"},
		"mv /root/storage.conf /etc/containers 2>/dev/null || rm /etc/containers/storage.conf; systemctl restart crius",
	},
	{
		"no signature policy", "mv /etc/containers/policy.json /root; systemctl restart crius",
		"crius check", []string{"no signature policy, images cannot be pulled", "install a signature policy"},
		"mv /root/policy.json /etc/containers; systemctl restart crius",
	},
	{
		"forwarding off", "sysctl -q -w net.ipv4.ip_forward=0",
		"crius check", []string{"IPv4 forwarding is off", "sysctl -w net.ipv4.ip_forward=1"},
		"sysctl -q -w net.ipv4.ip_forward=1",
	},
}

// meetFaults injects one fault after the other. The steady pod must stay
// unaffected.
func (p *operator) meetFaults(ctx context.Context) error {
	p.promise("before any fault the node is well", p.healthy(ctx))
	for _, f := range faults {
		since, err := shell("date +%s")
		if err != nil {
			return err
		}
		_, _ = shell(f.inject) // failures caused by the fault are part of it
		p.see(ctx, "fault: "+f.name+": cause and cure are told", "since="+since+f.look, f.says...)
		if out, err := shell(f.heal); err != nil {
			return fmt.Errorf("%s: %w: %s", f.heal, err, out)
		}
		p.promise("fault: "+f.name+": healed, and the pod is unharmed", p.healthy(ctx))
	}
	return nil
}

// untrusted starts a registry with a certificate that no node knows, until end
// is called.
func untrusted() (end func(), err error) {
	s := httptest.NewUnstartedServer(http.NotFoundHandler())
	if err := s.Listener.Close(); err != nil {
		return nil, err
	}
	if s.Listener, err = (&net.ListenConfig{}).Listen(context.Background(), "tcp", unknownCA); err != nil {
		return nil, err
	}
	s.StartTLS()
	return s.Close, nil
}

// pushLarge pushes the image that does not fit.
func pushLarge(images *registry.Registry) error {
	data := make([]byte, 16<<20)
	if _, err := rand.Read(data); err != nil {
		return err
	}
	layer, err := kit.NewLayer(kit.Regular("data", 0o644, data))
	if err != nil {
		return err
	}
	built, err := kit.Image{Layers: []kit.Layer{layer}}.Build()
	if err != nil {
		return err
	}
	images.Push("large", "1", built)
	return nil
}
