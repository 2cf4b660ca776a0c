package alchemist.spark;

import java.util.Collections;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * A matrix as a data source of Spark, with columns c0, c1, ...; {@code results.py} makes the options
 * {@code target} (see {@link Target}) and {@code partitions}.
 */
public final class MatrixSource implements TableProvider {
    @Override
    public StructType inferSchema(CaseInsensitiveStringMap options) {
        Target target = Target.parse(options.get("target"));
        StructField[] fields = new StructField[target.cols];
        for (int j = 0; j < fields.length; j++) {
            fields[j] = DataTypes.createStructField("c" + j, type(target.element), false);
        }
        return new StructType(fields);
    }

    static DataType type(Element element) {
        switch (element) {
            case BOOL: return DataTypes.BooleanType;
            case INT32: return DataTypes.IntegerType;
            case INT64: return DataTypes.LongType;
            case FLOAT32: return DataTypes.FloatType;
            default: return DataTypes.DoubleType;
        }
    }

    @Override
    public Table getTable(
            StructType schema, Transform[] partitioning, Map<String, String> options) {
        return new Matrix(schema, new CaseInsensitiveStringMap(options));
    }

    private static final class Matrix implements SupportsRead, ScanBuilder, Scan, Batch {
        private final StructType schema;
        private final CaseInsensitiveStringMap options;

        Matrix(StructType schema, CaseInsensitiveStringMap options) {
            this.schema = schema;
            this.options = options;
        }

        @Override
        public String name() {
            return "matrix of an Alchemist gang";
        }

        @Override
        public String description() {
            return name();
        }

        @Override
        public StructType schema() {
            return schema;
        }

        @Override
        public StructType readSchema() {
            return schema;
        }

        @Override
        public Set<TableCapability> capabilities() {
            return Collections.singleton(TableCapability.BATCH_READ);
        }

        @Override
        public ScanBuilder newScanBuilder(CaseInsensitiveStringMap more) {
            return this;
        }

        @Override
        public Scan build() {
            return this;
        }

        @Override
        public Batch toBatch() {
            return this;
        }

        @Override
        public InputPartition[] planInputPartitions() {
            long rows = Target.parse(options.get("target")).rows;
            int count = options.getInt("partitions", 1);
            InputPartition[] parts = new InputPartition[count];
            for (int k = 0; k < count; k++) {
                parts[k] = new MatrixReaders.Rows(rows * k / count, rows * (k + 1) / count);
            }
            return parts;
        }

        @Override
        public PartitionReaderFactory createReaderFactory() {
            return new MatrixReaders(options.get("target"));
        }
    }
}
