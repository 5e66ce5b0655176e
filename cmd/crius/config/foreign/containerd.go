package foreign

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const containerd = "containerd"

// Supported versions of containerd's configuration.
const oldest, newest = 2, 4

// Containerd reads the configuration of containerd from file, /etc/containerd/config.toml
// on a node, and the files that it imports. Tables merge, and later files win.
func Containerd(file string) (*Import, error) {
	top, ignored, files, version, err := containerdFiles(file)
	if err != nil {
		return nil, err
	}
	c := newConversion(containerd, top, containerdRules)
	for _, f := range ignored {
		c.remark(f.key, f.leaf, "containerd ignores this key here since version 3 of its configuration: it belongs to io.containerd.cri.v1.runtime or io.containerd.cri.v1.images")
	}
	c.out.Files = files
	c.plain(containerdRules, c.containerdKeys)
	d := containerdConversion{c, version}
	for _, joint := range []func(){d.socket, d.streams, d.pinned, d.apparmor, d.unprivileged, d.capabilities, d.plugins, d.tracing, d.pulls, d.keys, d.disabled, d.verifiers, d.old, d.runtimes} {
		joint()
	}
	c.out.Differ = append(c.out.Differ, "images: crius does not use containerd's image store; images are pulled again")
	c.finish()
	return c.out, errors.Join(c.problems...)
}

func containerdFiles(file string) (top *table, ignored []found, files []string, version int64, err error) {
	var r reader
	top = newTable()
	for pending := []string{file}; len(pending) > 0; {
		path := pending[0]
		pending = pending[1:]
		if slices.Contains(r.files, path) {
			continue
		}
		one, err := r.read(path)
		if errors.Is(err, fs.ErrNotExist) && path == file {
			return nil, nil, nil, 0, &absentError{containerd, path, "a file, as containerd config dump prints it", err}
		}
		if err != nil {
			return nil, nil, nil, 0, fmt.Errorf("read the configuration of containerd: %w", err)
		}
		if len(r.files) == 1 {
			if version, err = versionOf(path, one); err != nil {
				return nil, nil, nil, 0, err
			}
		}
		more, err := imports(path, one)
		if err != nil {
			return nil, nil, nil, 0, err
		}
		pending = append(pending, more...)
		ignored = append(ignored, takeIgnored(one)...)
		top.overlay(one, func([]string) bool { return false })
	}
	return top, ignored, r.files, version, nil
}

// takeIgnored removes and returns the keys in a file that containerd ignores: from version 3 on, the
// CRI plugin of version 2 has only those of its streams.
func takeIgnored(file *table) (ignored []found) {
	const old = "io.containerd.grpc.v1.cri"
	l, _ := file.leaf("version")
	plugin := file.table("plugins", old)
	if version, _ := l.value.(int64); version < 3 || plugin == nil {
		return nil
	}
	streams := func(name string) bool {
		return strings.HasPrefix(name, "stream_") || slices.Contains([]string{"disable_tcp_service", "enable_tls_streaming", "x509_key_pair_streaming"}, name)
	}
	plugin.walk(func([]string) bool { return false }, func(path []string, l leaf) {
		if !streams(path[0]) {
			ignored = append(ignored, found{leaf: l, key: keyOf(append([]string{"plugins", old}, path...))})
		}
	})
	maps.DeleteFunc(plugin.leaves, func(name string, _ leaf) bool { return !streams(name) })
	maps.DeleteFunc(plugin.tables, func(name string, _ *table) bool { return !streams(name) })
	return ignored
}

// versionOf returns the version of a file. It refuses versions with other plugin names.
func versionOf(path string, top *table) (int64, error) {
	l, set := top.leaf("version")
	version, ok := l.value.(int64)
	switch {
	case set && !ok:
		return 0, &Problem{Place: l.place, Key: "version", Text: "must be a number, got " + Format(l.value)}
	case version < oldest:
		return 0, &Problem{Place: path, Key: "version", Text: "version 1 is not supported: migrate the file with containerd config migrate (containerd 1.7 or earlier)"}
	case version > newest:
		return 0, &Problem{Place: l.place, Key: "version", Text: fmt.Sprintf("must be a version from %d to %d, got %d", oldest, newest, version)}
	}
	return version, nil
}

// imports returns the files that a file imports, by name or by pattern.
func imports(path string, top *table) ([]string, error) {
	l, set := top.leaf("imports")
	if !set {
		return nil, nil
	}
	list, err := textsOf(l.value)
	if err != nil {
		return nil, &Problem{Place: l.place, Key: "imports", Text: err.Error()}
	}
	var files []string
	for _, file := range list {
		if !filepath.IsAbs(file) {
			file = filepath.Join(filepath.Dir(path), file)
		}
		if !strings.Contains(file, "*") {
			files = append(files, filepath.Clean(file))
			continue
		}
		matches, err := filepath.Glob(file)
		if err != nil {
			return nil, &Problem{Place: l.place, Key: "imports", Text: fmt.Sprintf("%q: %v", file, err)}
		}
		files = append(files, matches...)
	}
	return files, nil
}

// containerdKeys visits every key that is set.
func (c *conversion) containerdKeys(visit func(found)) { c.keys(generalContainerd, visit) }

// generalContainerd returns the key of a path in the rules, and the name in place of NAME.
func generalContainerd(path []string) (general, name string) {
	if len(path) < 2 || path[0] != "plugins" {
		return strings.Join(path, "."), ""
	}
	id, known := plugin[path[1]]
	switch {
	case known:
	case strings.HasPrefix(path[1], "io.containerd.image-verifier."):
		return "plugins.other-verifier", ""
	default:
		return "plugins.OTHER", ""
	}
	path = slices.Clone(path)
	path[1] = id
	if len(path) > 5 && path[2] == "containerd" && path[3] == "runtimes" {
		name, path[4] = path[4], anyName
	}
	return strings.Join(path, "."), name
}

// containerdConversion has the rules that depend on several keys.
type containerdConversion struct {
	*conversion
	version int64
}

// cri returns the value of a key in any of the CRI plugins, with its path.
func (c containerdConversion) cri(path ...string) (leaf, []string) {
	for _, id := range slices.Sorted(maps.Keys(plugin)) {
		at := append([]string{"plugins", id}, path...)
		if l, set := c.top.leaf(at...); set && plugin[id] == "cri" {
			return l, at
		}
	}
	return leaf{}, append([]string{"plugins", "io.containerd.grpc.v1.cri"}, path...)
}

func (c containerdConversion) criFlag(unset bool, path ...string) (bool, []string) {
	l, at := c.cri(path...)
	if l.value == nil {
		return unset, at
	}
	return c.flag(at...), at
}

func (c containerdConversion) criText(path ...string) (string, []string) {
	l, at := c.cri(path...)
	if l.value == nil {
		return "", at
	}
	return c.text(at...), at
}

// socket lets cAdvisor find crius. For containerd it needs no such setting.
func (c containerdConversion) socket() {
	c.set("api.crio_socket", crioSocket, "chosen by crius",
		"so that the kubelet's container metrics have pod names; set its --container-runtime-endpoint to unix:///run/crius/crius.sock")
	for _, path := range [][]string{{"grpc", "gid"}, {"plugins", "io.containerd.server.v1.grpc", "gid"}} {
		if gid, _ := typed[int64](c.conversion, path); gid > 0 {
			c.set("api.socket_group", strconv.FormatInt(gid, 10), c.from(path), "")
		}
	}
	for _, table := range [][]string{{"grpc"}, {"plugins", "io.containerd.server.v1.grpc"}} {
		send, receive := append(slices.Clone(table), "max_send_message_size"), append(slices.Clone(table), "max_recv_message_size")
		n, _ := typed[int64](c.conversion, send)
		m, _ := typed[int64](c.conversion, receive)
		if size := max(n, m); size > 0 {
			c.set("api.max_message_size", size, c.from(send, receive), "")
		}
	}
}

func (c containerdConversion) streams() {
	address, at := c.criText("stream_server_address")
	port, also := c.criText("stream_server_port")
	on, flag := c.criFlag(false, "enable_tls_streaming")
	cert, from := c.criText("x509_key_pair_streaming", "tls_cert_file")
	key, keyFrom := c.criText("x509_key_pair_streaming", "tls_key_file")
	if address != "" || port != "" {
		if address == "" || on && (cert == "" || key == "") {
			address = "127.0.0.1"
		}
		if port == "" {
			port = "0"
		}
		c.set("api.stream_address", net.JoinHostPort(address, port), c.from(at, also), "")
	}
	if !on {
		return
	}
	if cert == "" || key == "" {
		l, _ := c.top.leaf(flag...)
		c.remark(keyOf(flag), l, "crius generates no certificate and therefore serves streams on the loopback address only, which is all that a kubelet needs: for another address, set api.stream_tls_cert_file and api.stream_tls_key_file as well")
		return
	}
	c.set("api.stream_tls_cert_file", cert, c.from(from), "")
	c.set("api.stream_tls_key_file", key, c.from(keyFrom), "")
}

// pinned imports all pinned images except that of the pause container.
func (c containerdConversion) pinned() {
	at := []string{"plugins", "io.containerd.cri.v1.images", "pinned_images"}
	images := c.top.table(at...)
	if images == nil {
		return
	}
	list := []string{}
	for _, name := range slices.Sorted(maps.Keys(images.leaves)) {
		if image := c.text(append(slices.Clone(at), name)...); name != "sandbox" && image != "" {
			list = append(list, image)
		}
	}
	if len(list) > 0 {
		c.set("image.pinned_images", list, images.asLeaf().place+" "+keyOf(at), "")
	}
}

func (c containerdConversion) apparmor() {
	if off, at := c.criFlag(false, "disable_apparmor"); off {
		c.set("pod.apparmor_profile", "", c.from(at), "")
	}
}

// unprivileged lets pods use low ports and ping without privileges if containerd does. The
// default is off in version 2 of the configuration, and on in later ones.
func (c containerdConversion) unprivileged() {
	for _, key := range []string{"ports", "icmp"} {
		on, at := c.criFlag(c.version > 2, "enable_unprivileged_"+key)
		c.set(c.rules["plugins.cri.enable_unprivileged_"+key].to, on, c.from(at), "")
	}
}

func (c containerdConversion) capabilities() {
	c.set("pod.default_capabilities", fourteenCapabilities, "default of "+containerd,
		"remove this key to use crius's own nine defaults: pods then lose MKNOD, NET_RAW, SETFCAP, SYS_CHROOT and AUDIT_WRITE")
}

func (c containerdConversion) plugins() {
	one, at := c.criText("cni", "bin_dir")
	l, also := c.cri("cni", "bin_dirs")
	list := []string{}
	if l.value != nil {
		var err error
		if list, err = textsOf(l.value); err != nil {
			c.problem(l.place, keyOf(also), err.Error())
		}
	}
	if len(list) == 0 && one != "" {
		list = []string{one}
	}
	if len(list) > 0 {
		c.set("network.plugin_dirs", list, c.from(also, at), "")
	}
}

func (c containerdConversion) tracing() {
	at := []string{"plugins", "io.containerd.tracing.processor.v1.otlp", "endpoint"}
	endpoint := c.text(at...)
	if endpoint == "" {
		return
	}
	if !strings.Contains(endpoint, "://") {
		scheme := "https://"
		if c.flag("plugins", "io.containerd.tracing.processor.v1.otlp", "insecure") {
			scheme = "http://"
		}
		endpoint = scheme + endpoint
	}
	c.set("tracing.endpoint", endpoint, c.from(at), "")
	protocol := []string{"plugins", "io.containerd.tracing.processor.v1.otlp", "protocol"}
	c.set("tracing.protocol", cmp.Or(c.text(protocol...), "http/protobuf"), c.from(protocol), "")
}

// pulls imports what both the CRI plugin for images and the transfer service have. The CRI plugin's
// values count unless they are the defaults, which containerd config default writes into both tables.
func (c containerdConversion) pulls() {
	transfer := []string{"plugins", "io.containerd.transfer.v1.local"}
	path, at := c.criText("registry", "config_path")
	if other := append(slices.Clone(transfer), "config_path"); path == "" && c.text(other...) != "" {
		path, at = c.text(other...), other
	}
	if _, set := c.top.leaf(at...); set {
		dirs := slices.DeleteFunc(filepath.SplitList(path), func(dir string) bool { return dir == "" })
		c.set("image.hosts_dirs", dirs, c.from(at), "")
	}
	const usual = 3
	_, at = c.cri("max_concurrent_downloads")
	n, set := typed[int64](c.conversion, at)
	other := append(slices.Clone(transfer), "max_concurrent_downloads")
	if m, also := typed[int64](c.conversion, other); also && (!set || n == usual) {
		n, set, at = m, true, other
	}
	if set {
		c.set("image.parallel_layers", n, c.from(at), "")
	}
}

// keys has crius decrypt images with the keys that the stream processors of ocicrypt use. It remarks on
// other processors, and on those with another directory.
func (c containerdConversion) keys() {
	table := c.top.table("stream_processors")
	if table == nil {
		return
	}
	dir := ""
	for _, name := range slices.Sorted(maps.Keys(table.tables)) {
		l, _ := table.leaf(name, "args")
		args, _ := textsOf(l.value)
		at := slices.Index(args, "--decryption-keys-path") + 1
		if !strings.HasPrefix(name, "io.containerd.ocicrypt.") || at == 0 || at == len(args) || dir != "" && args[at] != dir {
			of := table.tables[name].asLeaf()
			c.remark(keyOf([]string{"stream_processors", name}), of, notEncrypted)
			continue
		}
		dir = args[at]
		c.set("image.decryption_keys_path", dir, l.place+" "+keyOf([]string{"stream_processors", name, "args"}), "")
	}
}

// disabledPlugins lists the plugins that containerd does not load.
func (c containerdConversion) disabledPlugins() []string {
	l, set := c.top.leaf("disabled_plugins")
	if !set {
		return nil
	}
	list, err := textsOf(l.value)
	if err != nil {
		c.problem(l.place, "disabled_plugins", err.Error())
	}
	return list
}

// disabled keeps NRI plugins out if containerd does not load its own part of NRI. No other plugin
// that can be disabled has a counterpart in crius.
func (c containerdConversion) disabled() {
	if slices.Contains(c.disabledPlugins(), "io.containerd.nri.v1.nri") {
		c.set("nri.enable", false, c.from([]string{"disabled_plugins"}), "")
	}
}

const verifierPlugin = "io.containerd.image-verifier.v1.bindir"

// verifiers has crius ask containerd's image verifiers, at pulls only as containerd does, if there
// are any: containerd accepts every image if their directory does not exist, crius none.
func (c containerdConversion) verifiers() {
	path := []string{"plugins", verifierPlugin, "bin_dir"}
	dir := c.text(path...)
	if dir == "" {
		dir = "/opt/containerd/image-verifier/bin" // containerd's default
	}
	most := []string{"plugins", verifierPlugin, "max_verifiers"}
	n, limited := typed[int64](c.conversion, most)
	if limited && n != 0 {
		c.out.Builtin = append(c.out.Builtin, keyOf(most)+": crius asks all programs in image.verifiers_dir")
	}
	if limited && n == 0 {
		c.out.Unused = append(c.out.Unused, keyOf(most)) // it asks none
		return
	}
	if slices.Contains(c.disabledPlugins(), verifierPlugin) {
		return
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) == 0 {
		if _, set := c.top.leaf(path...); set {
			c.out.Unused = append(c.out.Unused, keyOf(path)+": there are no programs in it, and containerd accepts every image; with image.verifiers_dir, crius would accept none")
		}
		return
	}
	c.set("image.verifiers_dir", dir, c.from(path), "")
	c.set("image.verifiers_at_pull_only", true, c.from(path), "as containerd; without this line they are asked when an image is run as well")
}

// old remarks on two old tables of runtimes without a name.
func (c containerdConversion) old() {
	for _, key := range []string{"default_runtime", "untrusted_workload_runtime"} {
		at := []string{"plugins", "io.containerd.grpc.v1.cri", "containerd", key}
		if kind, _ := c.top.leaf(append(slices.Clone(at), "runtime_type")...); kind.value != nil && kind.value != "" {
			rule := c.rules["plugins.cri.containerd."+key]
			c.remark(keyOf(at), leaf{c.top.table(at...).asLeaf().value, kind.place}, rule.why)
			c.lastRestricts(rule.restricts)
		}
	}
}
