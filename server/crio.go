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

// ServeAsCrio answers as Serve does and, on the same socket, what cAdvisor asks
// of CRI-O over HTTP/1 (docs/decisions/0008-crio-facade.md). It closes l and
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

// crio are the two questions of cAdvisor (container/crio/client.go there).
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
		http.Error(w, valid(err.Error()), code)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		slog.Debug("cAdvisor closed its connection early", "err", err)
	}
}

// crioInfo is where images are. The driver has a name of its own: below the
// root of a container of overlay's, cAdvisor would look for a directory that
// only containers/storage makes. It measures no disks of containers then, of
// which kubelets learn by CRI.
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

// crioContainer is a container, or a pod: that is the one whose network is
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
	Root        string            `json:"root"` // empty, or cAdvisor would walk it once a minute
	Sandbox     string            `json:"sandbox"`
	IPs         []string          `json:"ip_addresses"`
}

var fullID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// crioContainer is the container or pod of an id, before which the prefix of its
// cgroup may be: of a scope of systemd's cAdvisor knows the id, of any other cgroup
// the whole name.
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

// crioPod is the pod as its infra container. Where it has none, any container's
// process leads to its network.
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

// withLabel is never nil: cAdvisor adds to what it gets.
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

// podName and containerName are the names that dockershim gave them and CRI-O
// gives them. The names and attempts that they are made of are unique.
func podName(p *view.Sandbox) string {
	m := p.Config.GetMetadata()
	return fmt.Sprintf("k8s_POD_%s_%s_%s_%d", m.GetName(), m.GetNamespace(), m.GetUid(), m.GetAttempt())
}

func containerName(p *view.Sandbox, c *view.Container) string {
	m, of := c.Config.GetMetadata(), p.Config.GetMetadata()
	return fmt.Sprintf("k8s_%s_%s_%s_%s_%d", m.GetName(), of.GetName(), of.GetNamespace(), of.GetUid(), m.GetAttempt())
}
