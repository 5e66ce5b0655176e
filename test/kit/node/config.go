package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"
)

// RegistryHost is the host in the names of images that the node's registry
// serves.
const RegistryHost = "registry.test"

// RegistryAddress is the address of that registry, inside the node's network.
const RegistryAddress = "127.0.0.1:5000"

// Bridge is the node's CNI bridge; v4 and v6 are the pod subnets.
const Bridge = "crbr0"

const criusTOML = `root = "{{.StateRoot}}"
run_root = "{{.RunRoot}}"
log_level = "debug"

[api]
listen = "{{.Socket}}"

[pod]
namespaces_dir = "{{.Path "ns"}}"
cgroup_parent = "{{.CgroupParent}}"

[runtime]
cgroup_driver = "cgroupfs"
monitor = "{{.Program "crius-conmon"}}"
monitor_cgroup = "/{{.ID}}/monitors"
hooks_dir = ["{{.Path "hooks.d"}}"]

[image]
root = "{{.ImageRoot}}"
run_root = "{{.Path "imgrun"}}"
registries_conf = "{{.Path "registries.conf"}}"
signature_policy = "{{.Path "policy.json"}}"
temporary_dir = "{{.Path "tmp"}}"

[network]
conf_dir = "{{.Path "cni" "net.d"}}"
plugin_dirs = ["{{.Path "cni" "bin"}}", "/usr/lib/cni", "/opt/cni/bin"]

[nri]
socket = "{{.Path "nri.sock"}}"
plugin_dir = "{{.Path "nri" "plugins"}}"
plugin_config_dir = "{{.Path "nri" "conf.d"}}"
registration_timeout = "5m" # plugins are a part of tests, which a busy machine may stop for seconds
request_timeout = "5m"
`

// cniConf has no "ipMasq": tests' pods do not use outside networks, and the
// rules for it cost more than the rest of a pod.
const cniConf = `{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "` + Bridge + `",
      "isGateway": true,
      "hairpinMode": true,
      "ipam": {
        "type": "host-local",
        "dataDir": "{{.Path "cni" "leases"}}",
        "ranges": [[{"subnet": "10.99.0.0/16"}], [{"subnet": "fd99::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}},
    {"type": "bandwidth", "capabilities": {"bandwidth": true}}
  ]
}
`

const registriesConf = `unqualified-search-registries = ["` + RegistryHost + `"]
short-name-mode = "disabled"

[[registry]]
prefix = "` + RegistryHost + `"
location = "` + RegistryAddress + `"
insecure = true

[[registry]]
location = "` + RegistryAddress + `"
insecure = true
`

// pinDirs are where namespaces are pinned. They exist from the beginning, so
// that the first pod of a kind does not appear to leave one behind.
var pinDirs = []string{"ns/netns", "ns/ipcns", "ns/utsns", "ns/userns"}

func (n *Node) writeConfig(extra string) error {
	dirs := append([]string{"cni/net.d", "cni/bin", "cni/leases", "crius.toml.d", "tmp", "logs"}, pinDirs...)
	for _, d := range dirs {
		if err := os.MkdirAll(n.Path(d), 0o755); err != nil {
			return err
		}
	}
	files := map[string]string{
		"crius.toml":              criusTOML,
		"registries.conf":         registriesConf,
		"policy.json":             `{"default": [{"type": "insecureAcceptAnything"}]}`,
		"cni/net.d/10-p.conflist": cniConf,
	}
	for name, text := range files {
		if err := n.Write(name, text); err != nil {
			return err
		}
	}
	if extra != "" {
		return n.Configure("10-options", extra)
	}
	return nil
}

// Write puts a file into the node's directory. text is a template executed on
// the node: {{.Path "x"}}, {{.CgroupParent}} and the like.
func (n *Node) Write(name, text string) error {
	t, err := template.New(name).Parse(text)
	if err != nil {
		return err
	}
	var out strings.Builder
	if err := t.Execute(&out, n); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(n.Path(name)), 0o755); err != nil {
		return err
	}
	return os.WriteFile(n.Path(name), []byte(out.String()), 0o644)
}

// Configure adds a configuration drop-in, in force from the next Start. Empty
// text removes it. text is a template, as in Write.
func (n *Node) Configure(name, text string) error {
	file := filepath.Join("crius.toml.d", name+".toml")
	if text == "" {
		return os.Remove(n.Path(file))
	}
	return n.Write(file, text)
}

// Registries adds text to registries.conf.
func (n *Node) Registries(text string) error {
	f, err := os.OpenFile(n.Path("registries.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(f, text); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
