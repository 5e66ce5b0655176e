package foreign

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const (
	crio    = "CRI-O"
	anyName = "NAME" // in the keys of rules
)

// CRIO reads the configuration of CRI-O from a directory, /etc/crio on a node: crio.conf, then
// crio.conf.d; or from a file like crio.conf, then the directory of its name with .d. Like CRI-O
// it reads every file of that directory, whatever its name is. Later files win, and the table of
// a runtime or workload replaces an earlier one as a whole.
func CRIO(path string) (*Import, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &absentError{crio, path, "a directory with crio.conf and crio.conf.d, or a file", err}
	}
	if err != nil {
		return nil, fmt.Errorf("read the configuration of CRI-O: %w", err)
	}
	main := path
	if info.IsDir() {
		main = filepath.Join(path, "crio.conf")
	}
	files, err := below(main + ".d")
	if err != nil {
		return nil, fmt.Errorf("read the drop-ins of CRI-O: %w", err)
	}
	if exists(main) {
		files = slices.Insert(files, 0, main)
	}
	top, read, err := crioFiles(files)
	if err != nil {
		return nil, err
	}
	c := newConversion(crio, top, crioRules)
	c.out.Files = read
	c.plain(crioRules, c.crioKeys)
	for _, joint := range []func(){c.socket, c.streams, c.messages, c.apparmor, c.plugins, c.metrics, c.tracing, c.checkpoints, c.defaultRuntime, c.runtimes, c.annotationsNotDone} {
		joint()
	}
	c.out.Differ = append(c.out.Differ,
		"unprivileged ports and ping: processes without capabilities may bind ports below 1024 and ping in their pods, as with containerd 2, unless default_sysctls says otherwise; pod.unprivileged_ports = false and pod.unprivileged_ping = false forbid it",
		"pod annotations: CRI-O passes most of them to the OCI runtime; crius passes only those listed in allowed_annotations of the handler or the workload")
	c.finish()
	return c.out, errors.Join(c.problems...)
}

// CRIOHandlers reads only the runtimes and the default runtime from the drop-ins in dir.
func CRIOHandlers(dir string) (*Import, error) {
	if _, err := os.Stat(dir); err != nil {
		return nil, err
	}
	files, err := below(dir)
	if err != nil {
		return nil, err
	}
	top, read, err := crioFiles(files)
	if err != nil {
		return nil, err
	}
	c := newConversion(crio, top, crioRules)
	c.out.Files = read
	c.plain(nil, func(visit func(found)) {
		c.crioKeys(func(f found) {
			if strings.HasPrefix(f.general, "crio.runtime.runtimes.") {
				visit(f)
			}
		})
	})
	if _, set := c.top.leaf("crio", "runtime", "default_runtime"); set {
		c.defaultRuntime()
	}
	c.runtimes()
	c.finish()
	return c.out, errors.Join(c.problems...)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// crioFiles merges files as CRI-O does.
func crioFiles(files []string) (*table, []string, error) {
	top := newTable()
	var r reader
	for _, file := range files {
		one, err := r.read(file)
		if err != nil {
			return nil, nil, fmt.Errorf("read the configuration of CRI-O: %w", err)
		}
		joinStorageOptions(top, one)
		top.overlay(one, isNamedTable)
	}
	return top, r.files, nil
}

// isNamedTable reports whether a table replaces an earlier one of the same name.
func isNamedTable(path []string) bool {
	return len(path) == 4 && path[0] == "crio" && path[1] == "runtime" && (path[2] == "runtimes" || path[2] == "workloads")
}

// joinStorageOptions adds the earlier storage options to those of a file. No other list is
// appended to.
func joinStorageOptions(before, file *table) {
	old, had := before.leaf("crio", "storage_option")
	added, has := file.leaf("crio", "storage_option")
	if !had || !has {
		return
	}
	older, ok := old.value.([]any)
	newer, also := added.value.([]any)
	if !ok || !also {
		return
	}
	older = slices.DeleteFunc(slices.Clone(older), func(o any) bool { return slices.Contains(newer, o) })
	file.tables["crio"].leaves["storage_option"] = leaf{append(older, newer...), added.place}
}

// crioKeys visits every key that is set.
func (c *conversion) crioKeys(visit func(found)) { c.keys(generalCRIO, visit) }

// generalCRIO returns the key of a path in the rules, and the name in place of NAME.
func generalCRIO(path []string) (general, name string) {
	if len(path) > 4 && isNamedTable(path[:4]) {
		name = path[3]
		path = slices.Clone(path)
		path[3] = anyName
	}
	return strings.Join(path, "."), name
}

// crioSocket is CRI-O's default socket, and the only path at which cAdvisor looks for
// CRI-O.
const crioSocket = "/var/run/crio/crio.sock"

// socket lets the kubelet find crius at the path of CRI-O's socket. At CRI-O's default path
// crius also answers cAdvisor's requests to CRI-O.
func (c *conversion) socket() {
	path := c.text("crio", "api", "listen")
	from := c.from([]string{"crio", "api", "listen"})
	if path == "" || plainRun(path) == plainRun(crioSocket) {
		c.set("api.crio_socket", crioSocket, from,
			"kubelets that are configured for CRI-O find crius here; crius listens at api.listen as well")
		return
	}
	c.set("api.listen", path, from, "")
}

func plainRun(path string) string {
	return strings.TrimPrefix(filepath.Clean(path), "/var")
}

// streams joins address and port, and imports certificates only if TLS is on.
func (c *conversion) streams() {
	address, port := c.text("crio", "api", "stream_address"), c.text("crio", "api", "stream_port")
	if address != "" || port != "" {
		if address == "" {
			address = "127.0.0.1"
		}
		if port == "" {
			port = "0"
		}
		c.set("api.stream_address", net.JoinHostPort(address, port), c.from([]string{"crio", "api", "stream_address"}, []string{"crio", "api", "stream_port"}), "")
	}
	if idle := c.text("crio", "api", "stream_idle_timeout"); idle != "" {
		path := []string{"crio", "api", "stream_idle_timeout"}
		if _, err := duration(idle); err != nil {
			l, _ := c.top.leaf(path...)
			c.problem(l.place, keyOf(path), err.Error())
		}
		c.set("api.stream_idle_timeout", idle, c.from(path), "")
	}
	if !c.flag("crio", "api", "stream_enable_tls") {
		return
	}
	c.files("api.stream_tls_cert_file", "crio", "api", "stream_tls_cert")
	c.files("api.stream_tls_key_file", "crio", "api", "stream_tls_key")
	c.files("api.stream_tls_client_ca_file", "crio", "api", "stream_tls_ca")
}

// files imports the path of a file if it is set.
func (c *conversion) files(to string, path ...string) {
	if file := c.text(path...); file != "" {
		c.set(to, file, c.from(path), "")
	}
}

// messages imports the larger of the two sizes, since crius has one bound.
func (c *conversion) messages() {
	send, receive := []string{"crio", "api", "grpc_max_send_msg_size"}, []string{"crio", "api", "grpc_max_recv_msg_size"}
	size := int64(0)
	for _, path := range [][]string{send, receive} {
		n, _ := typed[int64](c, path)
		if n <= 0 {
			n = 80 << 20 // CRI-O's default
		}
		size = max(size, n)
	}
	c.set("api.max_message_size", size, c.from(send, receive), "")
}

// insecure returns the lines of registries.conf for registries without TLS, or with certificates
// that nobody checks.
func insecure(value any) (lines string) {
	list, _ := textsOf(value) // of another type: without lines
	for _, registry := range list {
		lines += fmt.Sprintf("\n[[registry]]\nlocation = %q\ninsecure = true", registry)
	}
	return lines
}

// apparmor imports the name of a profile, except that of CRI-O's own profile.
func (c *conversion) apparmor() {
	path := []string{"crio", "runtime", "apparmor_profile"}
	_, set := c.top.leaf(path...)
	switch name := c.text(path...); name {
	case "", "crio-default":
		if set {
			c.out.Builtin = append(c.out.Builtin, keyOf(path)+": crius loads a profile of its own, crius-default")
		}
	case "unconfined":
		c.set("pod.apparmor_profile", "", c.from(path), "")
	default:
		c.set("pod.apparmor_profile", name, c.from(path), "load this profile at boot: crius loads none but its own")
	}
}

// plugins joins the old key for one directory with the list.
func (c *conversion) plugins() {
	dirs, one := []string{"crio", "network", "plugin_dirs"}, []string{"crio", "network", "plugin_dir"}
	list := []string{}
	if l, set := c.top.leaf(dirs...); set {
		var err error
		if list, err = textsOf(l.value); err != nil {
			c.problem(l.place, keyOf(dirs), err.Error())
		}
	}
	if dir := c.text(one...); dir != "" {
		list = append(list, dir)
	}
	if len(list) > 0 {
		c.set("network.plugin_dirs", list, c.from(dirs, one), "")
	} else {
		c.out.Differ = append(c.out.Differ, "crio.network.plugin_dirs: crius looks for CNI plugins in the directories of distributions as well as in /opt/cni/bin")
	}
}

// metrics serves metrics on TCP if CRI-O did.
func (c *conversion) metrics() {
	on := []string{"crio", "metrics", "enable_metrics"}
	if !c.flag(on...) {
		return
	}
	host := c.text("crio", "metrics", "metrics_host")
	if host == "" {
		host = "127.0.0.1"
	}
	port, set := typed[int64](c, []string{"crio", "metrics", "metrics_port"})
	if !set {
		port = 9090
	}
	c.set("metrics.address", net.JoinHostPort(host, fmt.Sprint(port)), c.from(on), "names of metrics differ: docs/metrics.md has those for dashboards")
	c.pair("metrics.tls_cert_file", "metrics_cert")
	c.pair("metrics.tls_key_file", "metrics_key")
}

// pair imports a file of a certificate, which CRI-O makes if it is missing.
func (c *conversion) pair(to, key string) {
	path := []string{"crio", "metrics", key}
	file, note := c.text(path...), ""
	if file == "" {
		return
	}
	if !exists(file) {
		note = "does not exist: CRI-O makes a pair that it signs itself, crius does not start without it"
	}
	c.set(to, file, c.from(path), note)
}

// tracing sends traces if CRI-O did.
func (c *conversion) tracing() {
	on := []string{"crio", "tracing", "enable_tracing"}
	if !c.flag(on...) {
		return
	}
	endpoint := c.text("crio", "tracing", "tracing_endpoint")
	if endpoint == "" {
		endpoint = "127.0.0.1:4317"
	}
	if !strings.Contains(endpoint, "://") {
		endpoint = "http://" + endpoint
	}
	c.set("tracing.endpoint", endpoint, c.from(on), "")
	rate := []string{"crio", "tracing", "tracing_sampling_rate_per_million"}
	if n, set := typed[int64](c, rate); set {
		c.set("tracing.sampling_rate_per_million", max(n, 0), c.from(rate), "")
	}
}

// checkpoints refuses checkpoints if one of CRI-O's keys does: the old switch, or a level, which may also
// allow containers to be restored.
func (c *conversion) checkpoints() {
	set := func(program string, path []string) { c.set("runtime.criu", program, c.from(path), "") }
	refused := false
	old := []string{"crio", "runtime", "enable_criu_support"}
	if on, is := typed[bool](c, old); is && on {
		set("criu", old)
	} else if is {
		set("", old)
		refused = true
	}
	for _, path := range [][]string{{"crio", "checkpoint_restore", "container_level_enabled"}, {"crio", "checkpoint", "container_level"}} {
		switch level := c.text(path...); {
		case level == "none":
			set("", path)
			refused = true
		case level == "" || refused:
		default:
			set("criu", path)
			if l, _ := c.top.leaf(path...); level != "checkpoint_only" {
				c.remark(keyOf(path), l, noRestore)
			}
		}
	}
}
