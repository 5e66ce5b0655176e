package network

import (
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/containernetworking/cni/pkg/version"
)

func TestAddresses(t *testing.T) {
	t.Parallel()
	const interfaces = `"interfaces": [{"name": "cni0"}, {"name": "veth1"}, {"name": "eth0", "sandbox": "/n"}, {"name": "lo", "sandbox": "/n"}, {"name": "eth0"}]`
	for name, c := range map[string]struct{ result, primary, want string }{
		"ipv4 first":        {`{"cniVersion": "1.0.0", "ips": [{"address": "fd00::2/64"}, {"address": "10.0.0.2/8"}]}`, "ipv4", "10.0.0.2 fd00::2"},
		"ipv6 first":        {`{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/8"}, {"address": "fd00::2/64"}]}`, "ipv6", "fd00::2 10.0.0.2"},
		"as cni has it":     {`{"cniVersion": "1.0.0", "ips": [{"address": "fd00::2/64"}, {"address": "10.0.0.2/8"}]}`, "cni", "fd00::2 10.0.0.2"},
		"unknown is ipv4":   {`{"cniVersion": "1.0.0", "ips": [{"address": "fd00::2/64"}, {"address": "10.0.0.2/8"}]}`, "", "10.0.0.2 fd00::2"},
		"order within":      {`{"cniVersion": "1.0.0", "ips": [{"address": "fd00::9/64"}, {"address": "10.0.0.9/8"}, {"address": "fd00::2/64"}, {"address": "10.0.0.2/8"}]}`, "ipv4", "10.0.0.9 10.0.0.2 fd00::9 fd00::2"},
		"the pod's only":    {`{"cniVersion": "1.1.0", ` + interfaces + `, "ips": [{"interface": 0, "address": "10.0.0.1/8"}, {"interface": 1, "address": "10.0.0.3/8"}, {"interface": 2, "address": "10.0.0.2/8"}, {"interface": 3, "address": "127.0.0.1/8"}, {"interface": 4, "address": "10.0.0.4/8"}]}`, "ipv4", "10.0.0.2"},
		"version 0.3.1":     {`{"cniVersion": "0.3.1", ` + interfaces + `, "ips": [{"version": "4", "interface": 2, "address": "10.0.0.2/8"}]}`, "ipv4", "10.0.0.2"},
		"version 0.2.0":     {`{"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.2/8"}, "ip6": {"ip": "fd00::2/64"}}`, "ipv4", "10.0.0.2 fd00::2"},
		"ipv4 in ipv6":      {`{"cniVersion": "1.0.0", "ips": [{"address": "::ffff:10.0.0.2/104"}]}`, "ipv4", "10.0.0.2"},
		"the host's only":   {`{"cniVersion": "1.0.0", ` + interfaces + `, "ips": [{"interface": 0, "address": "10.0.0.1/8"}]}`, "ipv4", ""},
		"none":              {`{"cniVersion": "1.0.0"}`, "ipv4", ""},
		"negative":          {`{"cniVersion": "1.0.0", ` + interfaces + `, "ips": [{"interface": -1, "address": "10.0.0.1/8"}]}`, "ipv4", "error: interface -1"},
		"beyond":            {`{"cniVersion": "1.0.0", ` + interfaces + `, "ips": [{"interface": 5, "address": "10.0.0.1/8"}]}`, "ipv4", "error: interface 5"},
		"null in the lists": {`{"cniVersion": "1.0.0", "interfaces": [null], "ips": [null, {"interface": 0, "address": "10.0.0.1/8"}]}`, "ipv4", "error: interface 0"},
	} {
		result, err := create.CreateFromBytes([]byte(c.result))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		ips, err := addresses(result, "eth0", c.primary)
		if want, ok := strings.CutPrefix(c.want, "error: "); ok {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q, %v", name, ips, err)
			}
			continue
		}
		if got := strings.Join(ips, " "); err != nil || got != c.want {
			t.Errorf("%s: %q, %v; want %q", name, got, err, c.want)
		}
	}
}

// Some plugins name the node's end of a link, or no interface of the pod at all. What the pod's
// interface has is the pod's, and nothing else.
func TestAddressesOfTheNodesEnd_cri_1544(t *testing.T) {
	t.Parallel()
	n := newNode(t, map[string]string{"10-fake.conflist": fakeConf})
	const both = `{"cniVersion": "1.0.0", "interfaces": [{"name": "eni1"}, {"name": "eth0", "sandbox": "/n"}], "ips": [{"interface": 0, "address": "10.0.0.7/24"}, {"interface": 0, "address": "10.0.0.8/24"}]}`
	const end = `{"cniVersion": "1.0.0", "interfaces": [{"name": "eni1"}], "ips": [{"interface": 0, "address": "10.0.0.7/24"}]}`
	for _, result := range []string{both, end} {
		n.recorder("cat >/dev/null\n[ $CNI_COMMAND = DEL ] || echo '" + result + "'\n")
		p := n.pod()
		n.run(p.NetNS, "ip link add eth0 type veth peer name peer0; ip addr add 10.0.0.7/24 dev eth0; ip link set eth0 up")
		a := n.attach(p)
		if strings.Join(a.IPs, " ") != "10.0.0.7" {
			t.Errorf("%s: %q", result, a.IPs)
		}
		n.detach(p, a)
	}
}

func FuzzAddresses(f *testing.F) {
	f.Add([]byte(`{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "x"}], "ips": [{"interface": 0, "address": "10.0.0.2/8"}]}`))
	f.Add([]byte(`{"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.2/8"}, "dns": {}}`))
	f.Add([]byte(`{"cniVersion": "1.1.0", "interfaces": [null], "ips": [null, {"interface": 0}], "routes": [null]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		result, err := create.CreateFromBytes(text)
		if err != nil {
			return
		}
		ips, err := addresses(result, "eth0", "ipv4")
		if err != nil && len(ips) > 0 {
			t.Errorf("%s: %q, %v", text, ips, err)
		}
		encode(result, "1.0.0")
	})
}

// A result that is recorded in the version of its configuration yields the same
// addresses when it is read again.
func FuzzResultVersions(f *testing.F) {
	for i := range version.All.SupportedVersions() {
		f.Add([]byte(`{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "x"}], "ips": [{"interface": 0, "address": "10.0.0.2/8"}]}`), uint8(i))
	}
	f.Add([]byte(`{"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.2/8"}, "ip6": {"ip": "fd00::2/64"}}`), uint8(7))
	f.Add([]byte(`{"cniVersion": "1.1.0", "ips": [{"address": "::ffff:10.0.0.2/104"}], "routes": [{"dst": "0.0.0.0/0"}]}`), uint8(2))
	f.Fuzz(func(t *testing.T, text []byte, to uint8) {
		result, err := create.CreateFromBytes(text)
		if err != nil {
			return
		}
		want, err := addresses(result, "eth0", "ipv4")
		if err != nil {
			return
		}
		all := version.All.SupportedVersions()
		cniVersion := all[int(to)%len(all)]
		encoded, err := encode(result, cniVersion)
		if err != nil {
			return
		}
		recorded, err := create.Create(cniVersion, encoded)
		if err != nil {
			t.Fatalf("%s in version %s is %s: %v", text, cniVersion, encoded, err)
		}
		got, err := addresses(recorded, "eth0", "ipv4")
		// Versions up to 0.2.0 have room for one address of each family.
		if cniVersion >= "0.3" && (err != nil || !slices.Equal(got, want)) {
			t.Errorf("%s in version %s: %q, want %q, %v", text, cniVersion, got, want, err)
		}
	})
}
