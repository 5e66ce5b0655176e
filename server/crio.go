package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/view"
)

// ServeAsCrio is Serve that also answers, on the same socket, cAdvisor's HTTP/1
// requests to CRI-O (docs/decisions/0008-crio-facade.md). It closes l and
// returns nil once Shutdown is complete.
func (s *Server) ServeAsCrio(ctx context.Context, l net.Listener) error {
	both := split(l)
	answers := &http.Server{
		Handler:           s.crio(),
		ReadHeaderTimeout: firstWords,
		ReadTimeout:       firstWords,
		WriteTimeout:      time.Minute,
		IdleTimeout:       5 * time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
	ended := make(chan error, 2)
	go func() { ended <- both.run(ctx) }()
	go func() {
		if err := answers.Serve(both.http); !errors.Is(err, net.ErrClosed) && !errors.Is(err, http.ErrServerClosed) {
			ended <- err
			return
		}
		ended <- nil
	}()
	err := s.Serve(both.grpc)
	return errors.Join(err, both.grpc.Close(), answers.Close(), <-ended, <-ended)
}

// crio serves the two requests of cAdvisor (container/crio/client.go there).
func (s *Server) crio() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /info", func(w http.ResponseWriter, r *http.Request) {
		info, err := s.crioInfo(r.Context())
		answerJSON(w, info, err)
	})
	mux.HandleFunc("GET /containers/{id}", func(w http.ResponseWriter, r *http.Request) {
		c, err := s.crioContainer(r.PathValue("id"))
		answerJSON(w, c, err)
	})
	return mux
}

func answerJSON(w http.ResponseWriter, answer any, err error) {
	if err != nil {
		code := http.StatusInternalServerError
		if errors.Is(err, fault.NotFound) || errors.Is(err, fault.Invalid) {
			code = http.StatusNotFound
		}
		http.Error(w, valid(fault.Text(err)), code)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		slog.Debug("cAdvisor closed its connection early", "err", err)
	}
}

// crioInfo says where images are. The driver has a name that cAdvisor does not
// know: with overlay, it would look below a container's root for a directory
// that only containers/storage makes. Without it cAdvisor measures no disks of
// containers; kubelets get those by CRI.
type crioInfo struct {
	StorageDriver string `json:"storage_driver"`
	StorageRoot   string `json:"storage_root"`
	StorageImage  string `json:"storage_image"`
}

func (s *Server) crioInfo(ctx context.Context) (*crioInfo, error) {
	images, _, err := s.images.FsInfo(ctx)
	if err != nil {
		return nil, err
	}
	return &crioInfo{StorageDriver: "crius", StorageRoot: images.Mountpoint}, nil
}

// crioContainer is a container, or a pod: the pod is the one whose network is
// counted.
type crioContainer struct {
	Name        string            `json:"name"`
	PID         int               `json:"pid"`
	Image       string            `json:"image"`
	ImageRef    string            `json:"image_ref"`
	CreatedTime int64             `json:"created_time"` // nanoseconds since 1970
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	LogPath     string            `json:"log_path"`
	Root        string            `json:"root"` // empty, otherwise cAdvisor would walk it once a minute
	Sandbox     string            `json:"sandbox"`
	IPs         []string          `json:"ip_addresses"`
}

var fullID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// crioContainer returns the container or pod with an id, which may have the
// prefix of its cgroup: for a systemd scope cAdvisor knows the id, for any
// other cgroup the whole name.
func (s *Server) crioContainer(id string) (*crioContainer, error) {
	id = strings.TrimPrefix(id, spec.CrioPrefix+"-")
	if !fullID.MatchString(id) {
		return nil, fmt.Errorf("%s is not a container id: %w", brief(id), fault.Invalid)
	}
	c, err := s.engine.Container(id)
	if errors.Is(err, fault.NotFound) {
		return s.crioPod(id)
	}
	if err != nil {
		return nil, err
	}
	p, err := s.engine.Sandbox(c.SandboxID)
	if err != nil {
		return nil, err
	}
	return &crioContainer{
		Name:        containerName(p, c),
		PID:         c.PID,
		Image:       cmp.Or(c.Config.GetImage().GetUserSpecifiedImage(), c.ImageRef),
		ImageRef:    c.ImageID,
		CreatedTime: c.CreatedAt.UnixNano(),
		Labels:      withLabel(c.Config.GetLabels(), "", ""),
		Annotations: c.Config.GetAnnotations(),
		LogPath:     c.LogPath,
		Sandbox:     c.SandboxID,
		IPs:         p.IPs,
	}, nil
}

// crioPod returns the pod as its infra container. If it has none, the process
// of any container leads to its network.
func (s *Server) crioPod(id string) (*crioContainer, error) {
	p, err := s.engine.Sandbox(id)
	if err != nil {
		return nil, err
	}
	pid := p.PID
	members, err := s.engine.SandboxContainers(id)
	if err != nil {
		return nil, err
	}
	for _, c := range members {
		if pid == 0 && c.State == cri.ContainerState_CONTAINER_RUNNING {
			pid = c.PID
		}
	}
	return &crioContainer{
		Name:        podName(p),
		PID:         pid,
		CreatedTime: p.CreatedAt.UnixNano(),
		Labels:      withLabel(p.Config.GetLabels(), "io.kubernetes.container.name", "POD"),
		Annotations: p.Config.GetAnnotations(),
		Sandbox:     p.ID,
		IPs:         p.IPs,
	}, nil
}

// withLabel never returns nil: cAdvisor adds to the map.
func withLabel(labels map[string]string, key, value string) map[string]string {
	all := map[string]string{}
	for k, v := range labels {
		all[k] = v
	}
	if key != "" {
		all[key] = value
	}
	return all
}

// podName and containerName return the names that dockershim used and CRI-O
// uses. They are unique, because the names and attempts in them are.
func podName(p *view.Sandbox) string {
	m := p.Config.GetMetadata()
	return fmt.Sprintf("k8s_POD_%s_%s_%s_%d", m.GetName(), m.GetNamespace(), m.GetUid(), m.GetAttempt())
}

func containerName(p *view.Sandbox, c *view.Container) string {
	m, of := c.Config.GetMetadata(), p.Config.GetMetadata()
	return fmt.Sprintf("k8s_%s_%s_%s_%s_%d", m.GetName(), of.GetName(), of.GetNamespace(), of.GetUid(), m.GetAttempt())
}
