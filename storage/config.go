package storage

import (
	"cmp"
	"path/filepath"
	"time"

	"go.podman.io/storage/types"

	"github.com/crius-run/crius/storage/quota"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/unpack"
)

// Config says where images are stored and how they are pulled. An empty path means the default of
// the containers/storage and containers/image libraries, so that crius, podman, skopeo and buildah
// share one store.
type Config struct {
	Root                     string        `toml:"root" apply:"restart: the store is opened at the start" form:"path or empty" help:"containers/storage graph root; empty: from storage.conf, else /var/lib/containers/storage"`
	RunRoot                  string        `toml:"run_root" apply:"restart: the store is opened at the start" form:"path or empty" help:"containers/storage run root; empty: from storage.conf, else /run/containers/storage"`
	ImageStore               string        `toml:"imagestore" apply:"restart: the store is opened at the start" form:"path or empty" help:"containers/storage imagestore: directory of images and their layers, when they are to be on another file system than the rest of root; empty: from storage.conf if root is empty, else in root"`
	Options                  []string      `toml:"options" apply:"restart: the store is opened at the start" help:"containers/storage driver options, as in storage.conf (overlay.mountopt=nodev)"`
	RegistriesConf           string        `toml:"registries_conf" apply:"reload" form:"path or empty" input:"yes" help:"registries.conf to use, with its drop-ins in the directory of the same name plus .d; empty: /etc/containers/registries.conf and its drop-ins"`
	ShortNameMode            string        `toml:"short_name_mode" apply:"reload" choices:"registries.conf,enforcing,disabled" help:"short names of images, without a registry, for which registries.conf has several registries and no alias: enforcing refuses them, disabled pulls from the first registry that has the image, registries.conf does what short-name-mode there says"`
	HostsDirs                []string      `toml:"hosts_dirs" apply:"reload" form:"path" input:"yes" help:"directories with containerd's REGISTRY/hosts.toml or _default/hosts.toml, such as /etc/containerd/certs.d, read at every pull; the first file that is found for a registry replaces its entries in registries.conf, but not blocked ones; empty: none"`
	SignaturePolicy          string        `toml:"signature_policy" apply:"reload" form:"path or empty" input:"yes" help:"signature policy (policy.json) checked when images are pulled, run or mounted; empty: /etc/containers/policy.json"`
	SignaturePolicyDir       string        `toml:"signature_policy_dir" apply:"reload" form:"path or empty" input:"yes" help:"directory with a NAMESPACE.json for each namespace whose pods need another policy than signature_policy; empty: none"`
	VerifiersDir             string        `toml:"verifiers_dir" apply:"reload" form:"path or empty" input:"yes" help:"directory of image verifiers, programs by the protocol of containerd's: every file in it is asked about an image when it is pulled, run or mounted, and all must accept it by exit code 0; empty: none"`
	VerifiersAtPullOnly      bool          `toml:"verifiers_at_pull_only" apply:"reload" help:"ask image verifiers only when an image is pulled, as containerd does; what is in the store already is run without"`
	VerifierTimeout          time.Duration `toml:"verifier_timeout" apply:"reload" form:"positive" help:"how long one image verifier may take; the image is refused if it takes longer"`
	AuthFile                 string        `toml:"auth_file" apply:"reload" form:"path or empty" input:"yes" help:"registry credentials for mirrors, and for registries for which the pull request carries none; empty: none"`
	NamespacedAuthDir        string        `toml:"namespaced_auth_dir" apply:"reload" form:"path or empty" input:"yes" help:"directory in which a credential provider writes registry credentials, each for a single pull, as for CRI-O: NAMESPACE-SHA256.json, where SHA256 is the digest of the repository's name; such a file is used instead of auth_file and then deleted; empty: none"`
	AdditionalArtifactStores []string      `toml:"additional_artifact_stores" apply:"restart: the stores are opened at the start" form:"path" input:"yes" help:"directories, each with a crius-artifacts as in an image root, whose OCI artifacts are used as well and never changed; such as a network file system with models; empty: none"`
	DecryptionKeysPath       string        `toml:"decryption_keys_path" apply:"reload" form:"path or empty" input:"yes" help:"directory with private keys, in PEM, DER or as JWK, that decrypt layers of encrypted images (ocicrypt); read at every pull of such an image; empty: encrypted images are refused"`
	TemporaryDir             string        `toml:"temporary_dir" apply:"restart: downloads to resume are looked for at the start" form:"path or empty" help:"directory for large temporary files of a pull, in crius-pull-JOB, and for downloads that the next pull resumes, in crius-downloads; empty: the imagestore, or without one crius-pulls in the graph root and crius-downloads beside it"`
	PullCgroup               string        `toml:"pull_cgroup" apply:"restart: the cgroup is prepared at the start" help:"cgroup in which images are unpacked, each by a process of its own, to bound what pulls take of the node: with the systemd driver a slice, such as pulls.slice, with cgroupfs a path below the cgroup mount, such as /pulls; pod: the cgroup of the pod for which the image is pulled; empty: that of crius"`
	PinnedImages             []string      `toml:"pinned_images" apply:"reload" help:"images the kubelet must not garbage collect: exact names, prefix* or *keyword*"`
	ParallelLayers           int           `toml:"parallel_layers" apply:"reload" form:"positive" help:"layers of one image downloaded at the same time"`
	UnpackParallel           int           `toml:"unpack_parallel" apply:"reload" help:"layers of one image unpacked at the same time, at most 16; 0: as many as there are processors, at least 2 and at most 8"`
	PullConnections          int           `toml:"pull_connections" apply:"reload" help:"connections over which the layers of one image are downloaded, at most 32: a layer of which more than 32 MiB are missing comes in parts over those that other layers leave, and may take 32 MiB more of the disk for each of pull_connections until it is there; 0 or 1: each layer comes over one"`
	ProgressTimeout          time.Duration `toml:"progress_timeout" apply:"reload" help:"cancel a pull that received no byte for this long, or a push of a checkpoint that sent none; 0: never"`
	MinPullRate              int64         `toml:"min_pull_rate" apply:"reload" help:"lowest average download rate over progress_timeout in bytes per second, while the registry owes data; slower pulls are cancelled; 0: one byte in that time is enough"`
	PullTimeout              time.Duration `toml:"pull_timeout" apply:"reload" help:"cancel a pull that takes longer than this in total, even if it makes progress; 0: never"`
	WritableSize             int64         `toml:"writable_layer_size" apply:"reload" help:"bytes that the writable layer of a container may have, at least 1 MiB, for containers created from now on; needs a file system with project quotas below root: XFS mounted with pquota, ext4 with prjquota; 0: overlay.size of options or storage.conf, else no limit"`
	WritableInodes           int64         `toml:"writable_layer_inodes" apply:"reload" help:"inodes that the writable layer of a container may have, at least 100, as writable_layer_size; 0: overlay.inodes of options or storage.conf, else no limit"`
	Volumes                  string        `toml:"volumes" apply:"reload" choices:"mkdir,bind,ignore" help:"what to do with volumes that images declare (VOLUME): mkdir creates the missing directories in the container's writable layer, bind also keeps them writable where the root file system is read-only, ignore does nothing"`
}

// MaxPullConnections is the maximum of PullConnections. It bounds the load on a registry, and the
// space for ranges that come ahead.
const MaxPullConnections = 32

// MaxUnpackParallel is the maximum of UnpackParallel. It bounds the memory of a worker.
const MaxUnpackParallel = 16

// DefaultPolicy is the path of a node's signature policy in containers-policy.json(5).
const DefaultPolicy = "/etc/containers/policy.json"

// Options are the options for opening a store: the operator's configuration, and what the program
// adds.
type Options struct {
	Config
	// StateDir is crius's own state root. Its containers/<id> hold the writable layers. Empty: no
	// writable layers are measured, and nobody owns the store.
	StateDir string
	// ReadOnly is for callers that change nothing: leftovers of dead pulls and damage of power cuts
	// stay.
	ReadOnly bool
	// Unpacker is the path of crius-unpack, which Open opens; empty: crius itself is the worker of
	// all pulls, which takes more CPU.
	Unpacker string
	// PullCgroups are the cgroups of workers; nil: the cgroup of this process.
	PullCgroups unpack.Cgroups `json:"-"`
	// ofLibrary are the limits of writable layers in storage.conf, for those that Config does not set.
	ofLibrary quota.Limits
	// CheckProgress is called during the post-crash check, whenever a part of an image has been
	// read, which may take long. It may be nil.
	CheckProgress func() `json:"-"`
}

// DefaultConfig returns the meaning of an empty configuration file.
func DefaultConfig() Config {
	return Config{
		ParallelLayers:  3,
		ProgressTimeout: 5 * time.Minute,
		MinPullRate:     1 << 10,
		PullTimeout:     24 * time.Hour, // a hundred gigabytes at 10 Mbit/s
		ShortNameMode:   registry.ModeOfFile,
		VerifierTimeout: 10 * time.Second,
		Volumes:         "mkdir",
	}
}

// containersDir returns the directory of the writable layers; empty: there is none.
func (o *Options) containersDir() string {
	if o.StateDir == "" {
		return ""
	}
	return filepath.Join(o.StateDir, "containers")
}

// takeLimits takes the limits of writable layers from the library's options, if crius's own set
// none. The error says why the limits cannot be enforced.
func (o *Options) takeLimits(from *types.StoreOptions) error {
	rest, limits, err := quota.TakeOptions(from.GraphDriverOptions)
	if err != nil {
		return err
	}
	from.GraphDriverOptions = rest
	o.ofLibrary = limits
	if o.StateDir == "" { // no layer is made
		return nil
	}
	return o.projects().Check()
}

func (o *Options) projects() *quota.Projects {
	return quota.In(o.containersDir(), o.limits(&o.Config))
}

// CheckLayerSizes says why a container cannot have a limit of its writable layer. The error is
// fault.Precondition.
func (o *Options) CheckLayerSizes() error {
	return o.projects().With(quota.Limits{Bytes: 1}).Check()
}

// limits returns the limits of new writable layers.
func (o *Options) limits(c *Config) quota.Limits {
	return quota.Limits{Bytes: cmp.Or(uint64(c.WritableSize), o.ofLibrary.Bytes), Inodes: cmp.Or(uint64(c.WritableInodes), o.ofLibrary.Inodes)}
}
