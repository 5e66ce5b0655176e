package foreign

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// mirrorLines returns the lines of registries.conf for containerd's table of mirrors, and sentences for what
// that file cannot say.
func mirrorLines(value any) string {
	lines, rest := "", ""
	mirrors, _ := value.(map[string]any) // of another type: without lines
	for _, registry := range slices.Sorted(maps.Keys(mirrors)) {
		endpoints, _ := tableOf(mirrors[registry])["endpoint"].([]any)
		if registry == "*" {
			rest += fmt.Sprintf("\nfor %q, all other registries, write the endpoints %s into DIR/_default/hosts.toml, and DIR into image.hosts_dirs", registry, Format(endpoints))
			continue
		}
		var own, others string
		for _, endpoint := range endpoints {
			location, insecure, sayable := locationOf(fmt.Sprint(endpoint))
			switch {
			case !sayable:
				rest += fmt.Sprintf("\n%s of %s cannot be a mirror for crius, which asks for /v2 right after the host", Format(endpoint), registry)
			case location == registry:
				own = insecure
			default:
				others += fmt.Sprintf("\n[[registry.mirror]]\nlocation = %q", location) + insecure
			}
		}
		lines += fmt.Sprintf("\n[[registry]]\nlocation = %q", registry) + own + others
	}
	return lines + rest
}

// locationOf returns the location in registries.conf of an endpoint, such as https://HOST/v2/PATH, and the line
// for one without TLS. It cannot say that of an endpoint with another path.
func locationOf(endpoint string) (location, insecure string, sayable bool) {
	scheme, place, _ := strings.Cut(endpoint, "://")
	if scheme == "http" {
		insecure = "\ninsecure = true"
	}
	host, path, _ := strings.Cut(strings.TrimSuffix(place, "/"), "/")
	below, isAPI := strings.CutPrefix(path+"/", "v2/")
	return strings.TrimRight(host+"/"+below, "/"), insecure, isAPI || path == ""
}

// unverifiedLines returns the lines of registries.conf for the registries of which containerd does not verify
// the certificate.
func unverifiedLines(value any) string {
	configs, _ := value.(map[string]any)
	var unverified []any
	for _, registry := range slices.Sorted(maps.Keys(configs)) {
		if tableOf(tableOf(configs[registry])["tls"])["insecure_skip_verify"] == true {
			unverified = append(unverified, registry)
		}
	}
	if len(unverified) == 0 {
		return ""
	}
	return "; write those whose certificate is not verified into registries.conf(5):" + insecure(unverified)
}

func tableOf(value any) map[string]any {
	table, _ := value.(map[string]any) // nil: has no keys
	return table
}
