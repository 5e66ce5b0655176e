package hostport

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
)

// setLocalnet enables or disables packets from and to 127.0.0.0/8 over links: a
// connection to 127.0.0.1 that leads to a pod needs them. The rules that
// protect the node against misuse exist as long as a pod has the link. Without
// it all other addresses still lead to the pod, so a failure is only logged.
func setLocalnet(ctx context.Context, links []string, on bool) {
	value := "0"
	if on {
		value = "1"
	}
	for _, link := range links {
		path := filepath.Join("/proc/sys/net/ipv4/conf", link, "route_localnet")
		err := os.WriteFile(path, []byte(value), 0o644)
		if err != nil && (on || !errors.Is(err, fs.ErrNotExist)) {
			slog.WarnContext(ctx, "host ports on 127.0.0.1 not forwarded", "err", err)
		}
	}
}
