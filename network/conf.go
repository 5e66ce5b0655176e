package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// maxConf bounds a configuration file. Real ones have a few kilobytes.
const maxConf = 1 << 20

// conf is a usable network configuration of the configuration directory.
type conf struct {
	file string
	list *libcni.NetworkConfigList // complete: its Bytes have everything
}

// choose picks the network: in the alphabetical order of file names, as in
// CRI-O and containerd, the first usable configuration, or the first with the
// name Config.DefaultNetwork. It skips unusable files, and logs each once.
func (n *Network) choose() (*conf, error) { return n.chooseIn(n.config().ConfDir) }

// chooseIn is choose in another directory.
func (n *Network) chooseIn(dir string) (*conf, error) {
	files, err := listed(dir, ".conflist", ".conf", ".json")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("CNI configuration: %w: %w", err, fault.Unavailable)
	}
	broken := map[string]string{}
	defer func() { n.report(dir, broken) }()
	for _, file := range files {
		list, err := load(file)
		if err == nil {
			list, err = complete(list)
		}
		if err != nil {
			broken[file] = err.Error()
			continue
		}
		if n.config().DefaultNetwork == "" || list.Name == n.config().DefaultNetwork {
			return &conf{file, list}, nil
		}
	}
	return nil, n.missing(dir, broken)
}

// inForce returns the networks of Config.ConfDir and dirs. A directory may not
// have one yet.
func (n *Network) inForce(dirs []string) []*libcni.NetworkConfigList {
	var lists []*libcni.NetworkConfigList
	for _, dir := range slices.Concat([]string{n.config().ConfDir}, dirs) {
		if chosen, err := n.chooseIn(dir); err == nil {
			lists = append(lists, chosen.list)
		}
	}
	return lists
}

func (n *Network) missing(dir string, broken map[string]string) error {
	text := fmt.Sprintf("no CNI network configuration in %s", dir)
	if n.config().DefaultNetwork != "" {
		text = fmt.Sprintf("no CNI configuration for network %q in %s", n.config().DefaultNetwork, dir)
	}
	text += ": install a network add-on, or put a *.conflist there"
	for _, file := range slices.Sorted(maps.Keys(broken)) { // the same text each time, because it becomes a node condition
		text += fmt.Sprintf("; %s is unusable: %s", filepath.Base(file), broken[file])
	}
	return fmt.Errorf("%s: %w", text, fault.Unavailable)
}

// report logs the files of a directory that have become unusable, or for a new
// reason.
func (n *Network) report(dir string, broken map[string]string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for file, why := range broken {
		if n.reported[file] != why {
			slog.Warn("unusable CNI configuration ignored", "file", file, "err", why)
		}
	}
	maps.DeleteFunc(n.reported, func(file, _ string) bool { return filepath.Dir(file) == filepath.Clean(dir) })
	maps.Copy(n.reported, broken)
}

// listed returns the files of dir with one of the extensions, sorted by name.
func listed(dir string, extensions ...string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var files []string
	for _, e := range entries {
		if !e.IsDir() && slices.Contains(extensions, filepath.Ext(e.Name())) {
			files = append(files, filepath.Join(dir, e.Name()))
		}
	}
	return files, nil
}

// load reads a configuration file. If the list keeps plugins in files of their
// own, in a directory with the name of the network, load adds them.
func load(file string) (*libcni.NetworkConfigList, error) {
	text, err := slurp(file)
	if err != nil {
		return nil, err
	}
	list, err := decode(text)
	if err != nil || list.LoadOnlyInlinedPlugins {
		return list, err
	}
	files, err := listed(filepath.Join(filepath.Dir(file), list.Name), ".conf")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, file := range files {
		text, err := slurp(file)
		if err != nil {
			return nil, err
		}
		plugin, err := libcni.NetworkPluginConfFromBytes(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		list.Plugins = append(list.Plugins, plugin)
	}
	return list, nil
}

// slurp reads a regular file of bounded size; a FIFO would block for ever.
func slurp(path string) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	text, err := io.ReadAll(io.LimitReader(file, maxConf+1))
	if err == nil && len(text) > maxConf {
		err = fmt.Errorf("%s is larger than %d bytes", path, maxConf)
	}
	return text, err
}

// parse parses the text of a complete configuration.
func parse(text []byte) (*libcni.NetworkConfigList, error) {
	list, err := decode(text)
	if err != nil {
		return nil, err
	}
	return complete(list)
}

// decode decodes a configuration list, or the older form with a single plugin.
func decode(text []byte) (*libcni.NetworkConfigList, error) {
	var form struct {
		Type    string          `json:"type"`
		Plugins json.RawMessage `json:"plugins"`
	}
	if err := json.Unmarshal(text, &form); err != nil {
		return nil, fmt.Errorf("not a CNI configuration: %w", err)
	}
	var list *libcni.NetworkConfigList
	var err error
	if form.Type != "" && form.Plugins == nil {
		list, err = decodeSingle(text)
	} else {
		list, err = libcni.NetworkConfFromBytes(text)
	}
	if err != nil {
		return nil, err
	}
	if err := utils.ValidateNetworkName(list.Name); err != nil { // also the name of a directory
		return nil, fmt.Errorf("name %.128q: %w", list.Name, err)
	}
	return list, nil
}

func decodeSingle(text []byte) (*libcni.NetworkConfigList, error) {
	plugin, err := libcni.NetworkPluginConfFromBytes(text)
	if err != nil {
		return nil, err
	}
	list, err := libcni.ConfListFromConf(plugin) //nolint:staticcheck // a directory may hold files of this form
	if err != nil {
		return nil, err
	}
	list.LoadOnlyInlinedPlugins = true
	return list, nil
}

// complete checks what libcni would only find out after running half of the
// plugins, and sets list.Bytes so that parse yields the same list again.
func complete(list *libcni.NetworkConfigList) (*libcni.NetworkConfigList, error) {
	if list.CNIVersion == "" {
		list.CNIVersion = "0.1.0" // as the CNI specification says
	}
	if !slices.Contains(version.All.SupportedVersions(), list.CNIVersion) {
		return nil, fmt.Errorf("cniVersion %.32q is not supported, use one of %s", list.CNIVersion, strings.Join(version.All.SupportedVersions(), ", "))
	}
	if len(list.Plugins) == 0 {
		return nil, errors.New("it lists no plugins")
	}
	plugins := make([]json.RawMessage, 0, len(list.Plugins))
	for _, plugin := range list.Plugins {
		for _, name := range []string{plugin.Network.Type, plugin.Network.IPAM.Type} {
			if name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
				return nil, fmt.Errorf("%.128q is not a valid plugin name", name)
			}
		}
		plugins = append(plugins, plugin.Bytes)
	}
	var all map[string]any
	if err := json.Unmarshal(list.Bytes, &all); err != nil {
		return nil, err
	}
	delete(all, "cniVersions") // DEL must have the same version as ADD, also from a later crius
	all["cniVersion"], all["plugins"] = list.CNIVersion, plugins
	text, err := json.Marshal(all)
	if err != nil {
		return nil, err
	}
	list.Bytes = text
	return list, nil
}
