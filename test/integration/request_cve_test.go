package integration

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
)

// The kubelet opens a subPath, binds it by its descriptor and passes the path
// of that mount. The path of the descriptor itself cannot be bound from another
// mount namespace; whatever a runtime does with it, the volume's own path,
// which may lead elsewhere by now, is not resolved again.
func TestOpenVolumesAreNotResolvedAgain_CVE_2017_1002101_CVE_2021_25741(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		volume, secret := w.dir(t), w.dir(t)
		sub := filepath.Join(volume, "sub")
		if err := os.Mkdir(sub, 0o755); err != nil {
			t.Fatal(err)
		}
		put(t, filepath.Join(sub, "file"), "the volume's")
		put(t, filepath.Join(secret, "file"), "the node's")
		fd, err := unix.Open(sub, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		bound := w.dir(t)
		if err := unix.Mount("/proc/self/fd/"+strconv.Itoa(fd), bound, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Unmount(bound, unix.MNT_DETACH) })
		if err := os.Rename(sub, filepath.Join(volume, "moved")); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(secret, sub); err != nil {
			t.Fatal(err)
		}
		p := w.run(t, handler)
		c := p.start(t, "sleep", withMounts(&cri.Mount{ContainerPath: "/data", HostPath: bound}))
		equal(t, "file of the volume", c.exec(t, "cat /data/file"), "the volume's")
		c.exec(t, "write /data/file changed")
		equal(t, "file of the node", read(t, filepath.Join(secret, "file")), "the node's")
		equal(t, "file that was written", read(t, filepath.Join(volume, "moved", "file")), "changed")

		source := filepath.Join("/proc", strconv.Itoa(os.Getpid()), "fd", strconv.Itoa(fd))
		if c := p.begin(t, "sleep", withMounts(&cri.Mount{ContainerPath: "/data", HostPath: source})); c != nil {
			equal(t, "file behind the descriptor", c.exec(t, "cat /data/file"), "changed")
		}
	})
}

// Each attempt of a container has the user of its own request, or the image's,
// whether or not the image was present and others of it ran.
func TestUserOfEachAttempt_CVE_2019_11245(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.image(t, func(c *imagespec.ImageConfig) { c.User = "app" })
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		as := func(attempt uint32, user *cri.Int64Value) int {
			return p.facts(t, func(c *cri.ContainerConfig) {
				c.Metadata.Name, c.Metadata.Attempt, c.Image.Image = "app", attempt, ref
				c.Linux.SecurityContext.RunAsUser = user
			}).UID
		}
		equal(t, "user of the image", as(0, nil), 1001)
		equal(t, "user of the image at the second attempt", as(1, nil), 1001)
		equal(t, "user of a request", as(2, &cri.Int64Value{Value: 1234}), 1234)
		w.pull(t, ref)
		equal(t, "user of the image after a request with another", as(3, nil), 1001)
	})
}

// Without SELinux, labels of volumes are the node's, whatever a request says.
func TestVolumesAreNotRelabelled_CVE_2021_43816(t *testing.T) {
	t.Parallel()
	const name, label = "security.selinux", "system_u:object_r:etc_t:s0"
	w := shared(t)
	volume := w.dir(t)
	file := filepath.Join(volume, "hosts")
	put(t, file, "x")
	for _, path := range []string{volume, file} {
		if err := unix.Setxattr(path, name, []byte(label), 0); err != nil {
			t.Fatalf("write a label: %v", err)
		}
	}
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).begin(t, "sleep", withMounts(
			&cri.Mount{ContainerPath: "/data", HostPath: volume, SelinuxRelabel: true},
			&cri.Mount{ContainerPath: "/etc/hosts", HostPath: file, SelinuxRelabel: true},
		))
		if c == nil {
			t.Error("a container with volumes to relabel does not run")
		}
		for _, path := range []string{volume, file} {
			value := make([]byte, 100)
			n, err := unix.Getxattr(path, name, value)
			if err != nil || string(value[:n]) != label {
				t.Errorf("the label of %s is %q now, %v", path, value[:max(n, 0)], err)
			}
		}
	})
}

// Names in requests of clients do not become names of metrics, which are kept
// for ever.
func TestMetricsDoNotGrowByRequests_CVE_2020_8551(t *testing.T) {
	t.Parallel()
	const odd = "unheardof"
	w := shared(t)
	p := w.run(t, "crun")
	server, err := url.Parse(p.forwardURL(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/" + odd, "/exec/" + odd, "/metrics/" + odd, "/" + odd + "/" + odd} {
		if status := w.ask(t, "http://"+server.Host+path, "SPDY/3.1"); status != http.StatusNotFound {
			t.Errorf("%s answers with status %d", path, status)
		}
	}
	ctx := t.Context()
	_, err = w.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: odd})
	wantCode(t, err, codes.NotFound, odd)
	_, err = w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: w.podConfig(t), RuntimeHandler: odd})
	wantCode(t, err, codes.NotFound, odd)
	_, err = w.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "registry.test/" + odd + ":1"}})
	wantCode(t, err, codes.NotFound, odd)
	if text := string(w.metrics(t)); strings.Contains(text, odd) || !strings.Contains(text, "ContainerStatus") {
		t.Errorf("metrics have names of what was asked for:\n%s", text)
	}
}

// The streaming server speaks HTTP/1.1 even to clients that prefer HTTP/2, with
// TLS and without.
func TestStreamsSpeakHTTP1Only_CVE_2023_39325_CVE_2023_44487(t *testing.T) {
	t.Parallel()
	w := shared(t)
	address := w.run(t, "crun").forwardURL(t)
	for name, text := range map[string]string{
		"prior knowledge": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
		"upgrade": "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\n" +
			"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
	} {
		answer := w.converse(t, address, text)
		if !strings.HasPrefix(answer, "HTTP/1.1 4") {
			t.Errorf("%s: the server answers %.100q", name, answer)
		}
	}
	a := newAuthority(t, "servers")
	encrypted := secure(t, t.TempDir(), a, nil)
	u, err := url.Parse(encrypted.run(t, "crun").forwardURL(t))
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	err = encrypted.Do(func() error {
		conn, err := tls.Dial("tcp", u.Host, &tls.Config{RootCAs: pool, NextProtos: []string{"h2", "http/1.1"}})
		if err != nil {
			return err
		}
		defer conn.Close()
		equal(t, "server takes HTTP/2", conn.ConnectionState().NegotiatedProtocol == "h2", false)
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// converse sends a text to a server and returns its complete answer.
func (w *world) converse(t *testing.T, address, text string) string {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	var answer []byte
	err = w.Do(func() error {
		var d net.Dialer
		conn, err := d.DialContext(t.Context(), "tcp", u.Host)
		if err != nil {
			return err
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(wait.Limit)); err != nil {
			return err
		}
		if _, err := io.WriteString(conn, text); err != nil {
			return err
		}
		answer, err = io.ReadAll(conn)
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return string(answer)
}

// A node without criu checkpoints nothing, in words that the kubelet's end-to-end tests know, and
// neither an archive nor an image that claims to be a checkpoint is restored.
func TestCheckpointsAreRefused_CVE_2024_8676_CVE_2025_0426_CVE_2026_50195_CVE_2026_53489_CVE_2026_53492_CVE_2026_92574_CVE_2026_95837_CVE_2026_115520_CVE_2026_119101(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p, outside := w.run(t, handler), w.dir(t)
		c := p.start(t, "sleep")
		for location, code := range map[string]codes.Code{
			"": codes.InvalidArgument, handler + "/checkpoint:1": codes.InvalidArgument, filepath.Join(outside, "archive.tar"): codes.Unimplemented,
		} {
			_, err := w.Runtime().CheckpointContainer(t.Context(), &cri.CheckpointContainerRequest{ContainerId: c.id, Location: location})
			wantCode(t, err, code)
		}
		empty(t, outside)
		equal(t, "state", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)

		archive := filepath.Join(outside, "archive.tar")
		put(t, archive, "not to be read")
		if c := p.begin(t, "sleep", func(c *cri.ContainerConfig) { c.Image.Image, c.Image.UserSpecifiedImage = archive, archive }); c != nil {
			t.Error("a container was made of an archive")
		}
		equal(t, "archive", read(t, archive), "not to be read")
	})
}
