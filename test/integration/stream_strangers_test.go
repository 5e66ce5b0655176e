package integration

import (
	"context"
	"net/url"
	"testing"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// streamFlood opens connections to the stream server as user nobody, keeps 1020
// of them, and renews the oldest all the time, whatever happens to a single
// one.
const streamFlood = `ulimit -n 4096
trap '' PIPE
for ((i = 0; ; i++)); do
	slot=$((i % 1020))
	[ -z "${held[slot]:-}" ] || eval "exec ${held[slot]}>&-"
	exec {fd}<>"/dev/tcp/$0/$1" || continue
	held[slot]=$fd
	printf 'GET /exec/' >&$fd
done 2>/dev/null`

// Any user of the node could keep all others from exec, attach and
// port-forward.
func TestExecWhileAnotherUserFloodsTheStreamServer(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	p := w.run(t, "crun")
	c := p.start(t, "sleep")
	address, err := url.Parse(w.execURL(t, c.execRequest("echo")))
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	flooded := make(chan struct{})
	go func() {
		defer close(flooded)
		_, _ = w.Run(ctx, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-c", streamFlood, address.Hostname(), address.Port())
	}()
	defer func() {
		cancel()
		<-flooded
	}()
	wait.For(t, "the flood", func() bool { return w.metric(t, "crius_stream_connections_closed_total") > 100 })
	name := p.config.Metadata.Namespace + "/" + p.config.Metadata.Name
	for range 20 {
		if code, out, errs := w.try(t, "", "exec", name, "--", "/probe", "echo", "through"); code != 0 || out != "through\n" {
			t.Errorf("exit code %d, %q, %q", code, out, errs)
		}
	}
}
