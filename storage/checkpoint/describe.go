package checkpoint

import (
	"encoding/json"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Owner is what the readers of an archive want to know of the pod.
type Owner struct {
	PodName, PodNamespace, PodUID string
	IPs                           []string
	Attempt                       uint32 // of the container
	LogPath                       string
}

// imageFormat is an annotation of crius's own.
const imageFormat = "checkpoint.crius.run/image-format"

// Annotations returns what checkpointctl, checkpoint-restore-operator and CRI-O read in spec.dump. They
// take the manager cri-o for the form of the archive.
func Annotations(c Config, o Owner) map[string]string {
	metadata, _ := json.Marshal(map[string]any{"name": c.Name, "attempt": o.Attempt}) // cannot fail
	all := map[string]string{
		"io.container.manager":                "cri-o",
		"io.kubernetes.cri-o.Metadata":        string(metadata),
		"io.kubernetes.cri-o.Name":            "k8s_" + c.Name + "_" + o.PodName + "_" + o.PodNamespace + "_" + o.PodUID + "_" + strconv.Itoa(int(o.Attempt)),
		"io.kubernetes.cri-o.ContainerID":     c.ID,
		"io.kubernetes.cri-o.Created":         c.CreatedAt.Format(time.RFC3339Nano),
		"io.kubernetes.cri-o.ImageName":       c.ImageName,
		"io.kubernetes.cri-o.ImageRef":        c.ImageRef,
		"io.kubernetes.cri-o.LogPath":         o.LogPath,
		"io.kubernetes.cri-o.ContainerType":   "container",
		"io.kubernetes.container.name":        c.Name,
		"io.kubernetes.pod.name":              o.PodName,
		"io.kubernetes.pod.namespace":         o.PodNamespace,
		"io.kubernetes.pod.uid":               o.PodUID,
		"org.criu.checkpoint.engine.name":     "crius",
		"org.criu.checkpoint.container.name":  c.Name,
		"org.criu.checkpoint.rootfsImageName": c.ImageName,
		"org.criu.checkpoint.runtime.name":    c.Runtime,
		imageFormat:                           c.Format,
	}
	for i, ip := range o.IPs {
		all["io.kubernetes.cri-o.IP."+strconv.Itoa(i)] = ip
	}
	return all
}

// PodManifest says what the directory of a pod's checkpoint consists of.
type PodManifest struct {
	Version        int       `json:"version"`
	PodID          string    `json:"podID"`
	Name           string    `json:"name"`
	Namespace      string    `json:"namespace"`
	UID            string    `json:"uid"`
	Handler        string    `json:"handler"`
	CheckpointedAt time.Time `json:"checkpointedAt"`
	Kernel         string    `json:"kernel"`
	Architecture   string    `json:"architecture"`
	Containers     []PodPart `json:"containers"`
	SharedMemory   string    `json:"sharedMemory,omitempty"` // an archive of /dev/shm
	Request        string    `json:"request,omitempty"`      // the file Request; empty: it was too large, or crius older
	Files          []File    `json:"files"`                  // all others in the directory
}

// File is a file of a checkpoint, which its manifest signs for.
type File struct {
	Path   string `json:"path"` // below the directory
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// PodPart is a container in a PodManifest.
type PodPart struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	ImageID   string `json:"imageID"`
	ImageRef  string `json:"imageRef,omitempty"` // name with the digest by which a registry has it; empty: unknown
	Directory string `json:"directory"`
	Bytes     int64  `json:"bytes"` // of its files
}

// MaxManifest bounds the encoding of a PodManifest.
const MaxManifest = 8 << 20

// manifestVersion is that of PodManifest. Version 1 had no files and no signature.
const manifestVersion = 2

// NewPodManifest adds to m what is known of this node.
func NewPodManifest(m PodManifest) PodManifest {
	m.Version, m.Architecture = manifestVersion, runtime.GOARCH
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	return m
}
